// The Autocast keys: query, key and value are cast to the dtype of the surrounding context, nothing
// else.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace mha_ext {
namespace {

template <c10::DeviceType device>
constexpr c10::DispatchKey autocast_key =
    device == c10::kCPU ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::AutocastCUDA;

template <c10::DeviceType device>
Tensor cast(const Tensor& tensor) {
  // The dtype is read at every call: a context may name any, and register_autocast would pin one.
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

template <c10::DeviceType device, class Signature>
struct Autocast;

// attention_forward(query, key, value, ...).
template <c10::DeviceType device, class... Rest>
struct Autocast<device, std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                           const Tensor&, Rest...)> {
  static std::tuple<Tensor, Tensor, Tensor> call(const Tensor& query, const Tensor& key,
                                                 const Tensor& value, Rest... rest) {
    c10::impl::ExcludeDispatchKeyGuard guard(autocast_key<device>);
    return ops::forward().call(cast<device>(query), cast<device>(key), cast<device>(value),
                               rest...);
  }
};

// attention_weights(query, key, ...).
template <c10::DeviceType device, class... Rest>
struct Autocast<device, Tensor(const Tensor&, const Tensor&, Rest...)> {
  static Tensor call(const Tensor& query, const Tensor& key, Rest... rest) {
    c10::impl::ExcludeDispatchKeyGuard guard(autocast_key<device>);
    return ops::weights().call(cast<device>(query), cast<device>(key), rest...);
  }
};

template <c10::DeviceType device>
void register_casts(torch::Library& m) {
  m.impl("attention_forward", &Autocast<device, ops::Forward>::call);
  m.impl("attention_weights", &Autocast<device, ops::Weights>::call);
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, AutocastCPU, m) { register_casts<c10::kCPU>(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutocastCUDA, m) { register_casts<c10::kCUDA>(m); }

}  // namespace mha_ext
