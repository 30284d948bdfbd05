// Any machine: 128-bit vectors of the compiler's own extension.
#include <math.h>
#include <stdint.h>

#include "../spec/dropout.h"
#include "kernels.h"
#include "scalar-inl.h"
#include "vec_portable-inl.h"
//
#include "product-inl.h"
#include "transpose-inl.h"
//
#include "tile-inl.h"
//
#include "nonfinite-inl.h"
//
#include "dropout-inl.h"
//
#include "bands-inl.h"
//
#include "lane_rows-inl.h"
//
#include "bias_lanes-inl.h"
//
#include "scores-inl.h"
//
#include "softmax-inl.h"
//
#include "lane_sums-inl.h"
//
#include "few_rows-inl.h"
//
#include "block_rows-inl.h"
//
#include "width-inl.h"
//
#include "forward_block-inl.h"
//
#include "forward-inl.h"
//
#include "weights-inl.h"
//
#include "few-inl.h"
//
#include "heads-inl.h"
//
#include "one-tile-inl.h"
//
#include "gradient-inl.h"
//
#include "bias-inl.h"
//
#include "backward_tile-inl.h"
//
#include "backward-inl.h"
//
#include "backward_few-inl.h"
//
#include "backward_one_tile-inl.h"
//
#include "tangent-inl.h"
//
#include "backward_tangent-inl.h"
//
#include "linear-inl.h"
//
#include "table-inl.h"

namespace mha_ext::cpu {
extern const Kernels kPortable;
constexpr Kernels kPortable = kernels<F32x4, F64x2>("portable");
}  // namespace mha_ext::cpu
