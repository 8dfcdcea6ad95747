// Attention for Python: KvLayout, rope_write and AttentionBatch.
#pragma once

#include <nanobind/nanobind.h>

namespace layby {

void bind_attention(nanobind::module_& m);

}  // namespace layby
