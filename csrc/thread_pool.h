// A small pool of threads that stay awake between the kernels of one step.
#pragma once

#include <cstddef>
#include <type_traits>

namespace layby {

// Cores this process may run on, counting hardware threads of one core once.
int available_cores();

// Threads that kernels use, the caller among them. Starts at available_cores().
int num_threads();
void set_num_threads(int count);

// Ends the pool's threads; kernels called later run on their caller alone.
void shut_down_threads();

// Calls fn(context, chunk) once for each chunk < chunks, and returns when all calls have.
void run_chunks(std::size_t chunks, void (*fn)(void* context, std::size_t chunk), void* context);

// Calls fn(chunk) for each chunk < chunks, on whichever thread is free first. What a chunk is must
// follow from the shape of the work alone: then no result depends on the number of threads.
template <class Fn>
void parallel_for(std::size_t chunks, Fn&& fn) {
  using Body = std::remove_reference_t<Fn>;
  run_chunks(
      chunks, [](void* context, std::size_t chunk) { (*static_cast<Body*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

// The same for `count` items in chunks of `grain`: fn(begin, end).
template <class Fn>
void parallel_ranges(std::size_t count, std::size_t grain, Fn&& fn) {
  parallel_for((count + grain - 1) / grain, [&](std::size_t chunk) {
    const std::size_t begin = chunk * grain;
    fn(begin, begin + grain < count ? begin + grain : count);
  });
}

}  // namespace layby
