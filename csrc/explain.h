// What a call of attention would do, told by the functions that decide it.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "spec/attention.h"

namespace pybind11 {
class module_;
}

namespace mha_ext {

// One pass over the problem: forward, backward, or the tangent of either.
struct Pass {
  std::string name, kernel;
  std::vector<std::string> why;
  int64_t tile_rows = 0, tile_keys = 0;
  bool of_group = false;  // a tile's rows are those of the heads that share K and V, else of one
  int64_t key_ranges = 1, tasks = 0, threads = 1;
  // Bytes it works in, beside what it returns: the scratch of all threads first.
  std::vector<std::pair<std::string, int64_t>> memory;
};

namespace cpu {
// All four, in that order. Addresses only say what there is: nothing is read through them.
std::vector<Pass> explain(const Attention& a, const AttentionGrad& g);
}  // namespace cpu

void bind_explain(pybind11::module_& m);

}  // namespace mha_ext
