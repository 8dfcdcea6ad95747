// See thread_pool.h. Work is handed out through one counter, so a thread that sleeps, or that the
// operating system has put aside, holds nobody up.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace layby {
namespace {

// How long a thread looks for new work before it sleeps: longer than what Python does between two
// kernels of a step, shorter than anybody would notice as load.
constexpr auto kSpin = std::chrono::microseconds(80);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int threads) { start(threads); }

  int threads() {
    std::lock_guard no_job(jobs_);
    return static_cast<int>(workers_.size()) + 1;
  }

  void resize(int threads) {
    std::lock_guard no_job(jobs_);
    stop();
    start(threads);
  }

  void run(std::size_t chunks, void (*fn)(void*, std::size_t), void* context) {
    std::lock_guard one_job(jobs_);
    const std::uint32_t job = (++job_) & kJobMask;
    // No ticket of the last job is left, so nobody reads these until the store to ticket_.
    ticket_.store(std::uint64_t{job} << 33 | kClosed, std::memory_order_seq_cst);
    fn_.store(fn, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    chunks_.store(static_cast<std::uint32_t>(chunks), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(std::uint64_t{job} << 33, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard lock(sleep_);
      wake_.notify_all();
    }
    take_chunks(job);
    for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins) {
      if (spins < 4000) {
        pause_cpu();
      } else {
        std::this_thread::yield();  // the other thread has lost its core
      }
    }
  }

 private:
  // ticket_ is (job, closed?, next chunk). A thread may run a chunk only if it moves the counter of
  // the very job whose fn_ it read, so one that comes late cannot touch a job that is over.
  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 32;
  static constexpr std::uint32_t kJobMask = (std::uint32_t{1} << 31) - 1;

  void start(int threads) {
    stopping_.store(false);
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }

  void stop() {
    {
      std::lock_guard lock(sleep_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }

  void take_chunks(std::uint32_t job) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    std::uint32_t finished = 0;
    while ((ticket >> 33) == job && !(ticket & kClosed)) {
      const auto fn = fn_.load(std::memory_order_relaxed);
      void* const context = context_.load(std::memory_order_relaxed);
      const std::uint32_t chunk = static_cast<std::uint32_t>(ticket);
      if (chunk >= chunks_.load(std::memory_order_relaxed)) break;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire)) {
        continue;
      }
      fn(context, chunk);
      ++finished;
      ticket = ticket_.load(std::memory_order_acquire);
    }
    if (finished != 0) done_.fetch_add(finished, std::memory_order_acq_rel);
  }

  void work() {
    auto seen = static_cast<std::uint32_t>(ticket_.load(std::memory_order_acquire) >> 33);
    while (wait_for_job_after(seen)) {
      seen = static_cast<std::uint32_t>(ticket_.load(std::memory_order_acquire) >> 33);
      take_chunks(seen);
    }
  }

  bool has_job_after(std::uint32_t seen) const {
    const std::uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    return (ticket >> 33) != seen && !(ticket & kClosed);
  }

  // False when the pool ends.
  bool wait_for_job_after(std::uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        if (has_job_after(seen)) return true;
        if (stopping_.load(std::memory_order_relaxed)) return false;
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return stopping_.load() || has_job_after(seen); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return !stopping_.load();
  }

  alignas(64) std::atomic<std::uint64_t> ticket_{kClosed};
  alignas(64) std::atomic<std::uint32_t> done_{0};
  alignas(64) std::atomic<void (*)(void*, std::size_t)> fn_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<std::uint32_t> chunks_{0};
  std::uint32_t job_ = 0;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex jobs_, sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// Never destroyed: a thread may still be inside a kernel while the process ends.
std::mutex* pool_mutex = new std::mutex;
std::atomic<Pool*> pool{nullptr};

// A forked child has none of the parent's threads and perhaps its locks: it starts a pool of its
// own and leaves the inherited one alone.
void forget_pool_in_child() {
  pool_mutex = new std::mutex;
  pool.store(nullptr);
}

Pool& current_pool() {
  if (Pool* ready = pool.load(std::memory_order_acquire)) return *ready;
  std::lock_guard lock(*pool_mutex);
  if (Pool* ready = pool.load(std::memory_order_acquire)) return *ready;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  Pool* made = new Pool(available_cores());
  pool.store(made, std::memory_order_release);
  return *made;
}

}  // namespace

int available_cores() {
#if defined(__linux__)
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) > 0) {
    std::set<std::string> cores;  // by the list of their hardware threads
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                         "/topology/thread_siblings_list");
      std::string siblings;
      if (!std::getline(file, siblings)) siblings = "alone " + std::to_string(cpu);
      cores.insert(siblings);
    }
    return static_cast<int>(cores.size());
  }
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

int num_threads() { return current_pool().threads(); }

void set_num_threads(int count) { current_pool().resize(count); }

void shut_down_threads() {
  if (Pool* ready = pool.load()) ready->resize(1);
}

void run_chunks(std::size_t chunks, void (*fn)(void*, std::size_t), void* context) {
  if (chunks == 0) return;
  if (chunks == 1) return fn(context, 0);
  current_pool().run(chunks, fn, context);
}

}  // namespace layby
