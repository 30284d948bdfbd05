// explain: the checks and the description of attention_forward, then the plan of each pass and a
// count of what its tiles see, instead of the work.
#include "explain.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "ops.h"
#include "problem.h"
#include "spec/mask.h"

namespace mha_ext {
namespace {

namespace py = pybind11;

// Why a pair is hidden, or a tile skipped: the first of these that does it alone.
enum Hides { kLengths, kBand, kMask, kHides };

struct Counts {
  int64_t full = 0, partial = 0;
  std::array<int64_t, kHides> empty = {};
  void add(const Counts& o, int64_t times) {
    full += times * o.full;
    partial += times * o.partial;
    for (int i = 0; i < kHides; i++) empty[i] += times * o.empty[i];
  }
};

// f(b, h) and how many times it counts: once for all entries between which nothing differs.
template <class F>
void for_each_head(const Attention& a, int64_t heads, const F& f) {
  const bool same_batch = !a.key_lengths && !(a.mask.data && a.mask.batch);
  const bool same_head = !(a.mask.data && a.mask.head);
  if (a.batch * heads == 0) return;
  for (int64_t b = 0; b < (same_batch ? 1 : a.batch); b++)
    for (int64_t h = 0; h < (same_head ? 1 : heads); h++)
      f(b, h, (same_batch ? a.batch : 1) * (same_head ? heads : 1));
}

// Tiles of 64 queries of a head.
Counts count_tiles(const Attention& a) {
  Counts counts;
  uint64_t bits[kTile];
  for_each_head(a, a.heads, [&](int64_t b, int64_t h, int64_t times) {
    Counts head;
    for (int64_t q0 = 0; q0 < a.queries; q0 += kTile) {
      const int64_t rows = min_of(kTile, a.queries - q0);
      const Range seen = seen_by_any(a, b, q0, q0 + rows - 1);
      for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
        const int64_t keys = min_of(kTile, a.keys - k0);
        const Visibility visible = tile_visibility(a, b, h, q0, rows, k0, keys, bits);
        if (visible != Visibility::kEmpty)
          (visible == Visibility::kFull ? head.full : head.partial)++;
        else if (k0 >= key_count(a, b))
          head.empty[kLengths]++;
        else
          head.empty[seen.begin >= k0 + keys || seen.end <= k0 ? kBand : kMask]++;
      }
    }
    counts.add(head, times);
  });
  return counts;
}

// Tiles of `size` rows of the heads that share K and V.
Counts count_tiles_of_group(const Attention& a, int64_t size) {
  Counts counts;
  const int64_t shared = a.heads / a.kv_heads, rows = shared * a.queries;
  for_each_head(a, a.kv_heads, [&](int64_t b, int64_t kv, int64_t times) {
    Counts head;
    for (int64_t first = 0; first < rows; first += size)
      for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
        const int64_t keys = min_of(kTile, a.keys - k0);
        uint64_t any = 0, all = ~0ull;
        bool band = false;
        for (int64_t r = first; r < min_of(first + size, rows); r++) {
          const int64_t h = kv * shared + r / a.queries, i = r % a.queries;
          const Range seen = band_keys(a, b, i);
          const uint64_t bits = row_visibility(a, b, h, i, k0, keys);
          band |= seen.begin < k0 + keys && seen.end > k0;
          any |= bits;
          all &= bits;
        }
        if (any)
          (all == first_bits(keys) ? head.full : head.partial)++;
        else
          head.empty[k0 >= key_count(a, b) ? kLengths : band ? kMask : kBand]++;
      }
    counts.add(head, times);
  });
  return counts;
}

// Pairs that are hidden, by what.
std::array<int64_t, kHides> count_hidden(const Attention& a) {
  std::array<int64_t, kHides> hidden = {};
  for_each_head(a, a.heads, [&](int64_t b, int64_t h, int64_t times) {
    const int64_t count = key_count(a, b);
    hidden[kLengths] += times * a.queries * (a.keys - count);
    for (int64_t i = 0; i < a.queries; i++) {
      const Range band = band_keys(a, b, i);
      hidden[kBand] += times * (count - (band.end - band.begin));
      if (!a.mask.data) continue;
      int64_t seen = 0;
      for (int64_t k0 = band.begin / kTile * kTile; k0 < band.end; k0 += kTile)
        seen += __builtin_popcountll(row_visibility(a, b, h, i, k0, min_of(kTile, a.keys - k0)));
      hidden[kMask] += times * (band.end - band.begin - seen);
    }
  });
  return hidden;
}

py::dict by_name(const std::array<int64_t, kHides>& counts) {
  const char* names[kHides] = {"key_lengths", "causal or window", "mask"};
  py::dict found;
  for (int i = 0; i < kHides; i++)
    if (counts[i]) found[names[i]] = counts[i];
  return found;
}

py::dict tiles(const Attention& a, const Pass& pass) {
  const Counts counts =
      pass.of_group ? count_tiles_of_group(a, max_of(1, pass.tile_rows)) : count_tiles(a);
  py::dict found;
  found["full"] = counts.full;
  found["partial"] = counts.partial;
  found["skipped"] = by_name(counts.empty);
  return found;
}

py::dict described(const Pass& pass) {
  py::dict found;
  found["name"] = pass.name;
  found["kernel"] = pass.kernel;
  found["why"] = pass.why;
  found["tile"] = std::make_pair(pass.tile_rows, pass.tile_keys);
  found["key_ranges"] = pass.key_ranges;
  found["tasks"] = pass.tasks;
  found["threads"] = pass.threads;
  found["memory"] = pass.memory;
  return found;
}

// Whether the dispatcher has a kernel for the device that is not made of others.
bool has_kernel(const char* name, c10::DispatchKey key) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("mha_ext::attention_" + std::string(name)).c_str(), "")
      .hasKernelForDispatchKey(key);
}

py::dict explain(const Tensor& query, const Tensor& key, const Tensor& value,
                 const OptionalTensor& mask, const OptionalTensor& bias,
                 const OptionalTensor& key_lengths, const OptionalTensor& seed,
                 const std::optional<std::string>& corner, std::optional<int64_t> window_left,
                 std::optional<int64_t> window_right, double dropout_p, double scale,
                 bool uniform_empty_rows, const std::array<int64_t, 4>& origin,
                 const std::array<bool, 2>& output_mask) {
  std::vector<Tensor> keep;
  const auto symbol = [](std::optional<int64_t> x) {
    return x ? OptionalSymInt(*x) : std::nullopt;
  };
  Attention a = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner ? OptionalString(*corner) : std::nullopt, symbol(window_left), symbol(window_right),
       dropout_p, scale, uniform_empty_rows, c10::fromIntArrayRefSlow(origin)},
      keep)[0];
  // Masks and lengths are read here, wherever they are; where they are nowhere, nothing is counted.
  const bool readable = (!mask || !mask->is_meta()) && (!key_lengths || !key_lengths->is_meta());
  Tensor mask_here, lengths_here;
  a.mask = {};
  a.key_lengths = nullptr;
  if (mask && readable) a.mask = pairs_of(mask_here = mask->cpu(), 0);
  if (key_lengths && readable) {
    lengths_here = key_lengths->to(at::kLong).cpu().contiguous();
    a.key_lengths = lengths_here.const_data_ptr<int64_t>();
  }
  static char present;  // an address that nobody reads
  if (bias) a.bias.data = &present;
  AttentionGrad g;
  if (output_mask[0]) g.grad_query.data = &present;
  if (output_mask[1] && bias) {
    g.grad_bias = pairs_of(*bias, 0);
    g.grad_bias.data = &present;
  }

  const bool on_cpu = query.is_cpu() || query.is_meta();
  std::vector<Pass> passes(4);
  if (on_cpu)
    passes = cpu::explain(a, g);
  else
    for (int i = 0; i < 4; i++)
      passes[i].name = std::array{"forward", "backward", "forward_tangent", "backward_tangent"}[i];
  py::dict found;
  py::list described_passes;
  for (const Pass& pass : passes) {
    py::dict one = described(pass);
    if (!on_cpu) {
      const auto dispatch_key =
          query.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::Undefined;
      one["kernel"] = has_kernel(pass.name.c_str(), dispatch_key) ? "CUDA" : "";
    }
    one["tiles"] = on_cpu && readable ? py::object(tiles(a, pass)) : py::object(py::none());
    described_passes.append(one);
  }
  found["passes"] = described_passes;
  found["hidden"] = readable ? py::object(by_name(count_hidden(a))) : py::object(py::none());
  int64_t copied = 0;
  const std::array<const Tensor*, 5> given = {
      &query, &key, &value, key_lengths ? &*key_lengths : nullptr, seed ? &*seed : nullptr};
  for (const Tensor& tensor : keep) {
    const bool is_given = std::any_of(given.begin(), given.end(), [&](const Tensor* one) {
      return one && tensor.is_alias_of(*one);
    });
    if (!is_given) copied += static_cast<int64_t>(tensor.nbytes());
  }
  found["copied"] = copied;
  return found;
}

}  // namespace

void bind_explain(py::module_& m) {
  const auto none = py::none();
  m.def("explain", &explain, py::arg("query"), py::arg("key"), py::arg("value"),
        py::arg("mask") = none, py::arg("bias") = none, py::arg("key_lengths") = none,
        py::arg("seed") = none, py::kw_only(), py::arg("corner") = none,
        py::arg("window_left") = none, py::arg("window_right") = none, py::arg("dropout_p") = 0.0,
        py::arg("scale") = 1.0, py::arg("uniform_empty_rows") = false,
        py::arg("origin") = std::array<int64_t, 4>{},
        py::arg("output_mask") = std::array<bool, 2>{true, true},
        R"(What attention_forward and its derivatives would do with these arguments, as a dict.

passes: for each of forward, backward and their tangents a dict of name, kernel, why, tile (rows,
keys), key_ranges, tasks, threads, memory (what, bytes) and tiles (full, partial, skipped by what).
hidden: pairs, by what hides them. copied: bytes of inputs whose strides cannot be read in place.
Tensors may be on the meta device; then tiles and hidden are None where they depend on values.
output_mask: whether the gradients of query and of bias are wanted.)");
}

}  // namespace mha_ext
