// The way from mha_ext.attention to the dispatcher that does without torch.ops.
#pragma once

namespace pybind11 {
class module_;
}

namespace mha_ext {

void bind_direct(pybind11::module_& m);

}  // namespace mha_ext
