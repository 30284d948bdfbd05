// The functions of one instruction set and one type, as kernels.h wants them.
namespace mha_ext::cpu {
namespace {

template <class K>
int64_t backward_scratch_bytes(const Attention& a) {
  Arena backward_arena{nullptr}, few_arena{nullptr}, bias_arena{nullptr};
  BackwardScratch<K> backward_scratch(a, backward_arena);
  BackwardFewScratch<K> few_scratch(a, few_arena);
  GradScratch<K> bias_scratch(a, bias_arena);
  bias_arena.take<typename K::Unit>(kTile * operand_width<K>(a.head_dim));
  bias_arena.take<typename K::Unit>(kTile * operand_width<K>(a.value_dim));
  return max_of(backward_arena.used, max_of(few_arena.used, bias_arena.used));
}

template <class K>
int64_t forward_scratch_bytes(const Attention& a) {
  Arena arena{nullptr};
  ForwardScratch<K> scratch(a, arena);
  const int64_t levels = 3 * round_up(kRow * (int64_t)sizeof(typename K::T), 64);
  Arena group_arena{nullptr, arena.used};
  GroupScratch<K> group_scratch(a, group_arena);
  Arena few_arena{nullptr};
  FewScratch<K> few_scratch(a, few_arena);
  return max_of(max_of(arena.used + levels, group_arena.used), few_arena.used);
}

template <class K>
int64_t forward_tangent_scratch_bytes(const Attention& a) {
  Arena arena{nullptr};
  ForwardTangentScratch<K> scratch(a, arena);
  return arena.used;
}

template <class K>
int64_t backward_tangent_scratch_bytes(const Attention& a) {
  Arena backward_arena{nullptr}, bias_arena{nullptr};
  BackwardTangentScratch<K> backward_scratch(a, backward_arena);
  GradTangentScratch<K> bias_scratch(a, bias_arena);
  bias_arena.take<typename K::Unit>(2 * kTile * operand_width<K>(a.head_dim));
  bias_arena.take<typename K::Unit>(2 * kTile * operand_width<K>(a.value_dim));
  return max_of(backward_arena.used, bias_arena.used + 4 * 64);
}

template <class K>
int64_t state_bytes(const Attention& a) {
  return has_few_queries(a, K::kLimits) && !takes_groups(a, K::kLimits) ? few_state_bytes<K>(a)
                                                                        : block_state_bytes<K>(a);
}

template <class X, class Dot, class S>
constexpr TypeKernels type_kernels() {
  using K = Kind<X, Dot, S>;
  return {sizeof(typename K::T),
          forward_scratch_bytes<K>,
          backward_scratch_bytes<K>,
          forward_tangent_scratch_bytes<K>,
          backward_tangent_scratch_bytes<K>,
          group_of<K>,
          packs<K>,
          K::kLimits,
          forward_any<K>,
          forward_heads<K>,
          merge<K>,
          forward_few<K>,
          merge_few<K>,
          state_bytes<K>,
          delta<K>,
          backward_any<K>,
          backward_heads<K>,
          add_sums<K>,
          add_ranges<K>,
          bias_share<K>,
          bias_finish<K>,
          forward_tangent<K>,
          delta_tangent<K>,
          backward_tangent<K>,
          bias_share_tangent<K>,
          weights<K>,
          multiply_add<X, Dot>};
}

template <class F32>
constexpr LinearKernel linear_kernel() {
  return {kLinearRows, kLinearColumns, 12, 60, 4, false, linear_scratch_bytes, linear<F32>};
}

template <class F32, class F64>
constexpr Kernels kernels(const char* name) {
  return {
      name,
      {type_kernels<F64, Multiply<F64>, double>(), type_kernels<F32, Multiply<F32>, float>(),
       type_kernels<F32, Multiply<F32>, BFloat16>(), type_kernels<F32, Multiply<F32>, Float16>()},
      linear_kernel<F32>(),
      linear_kernel<F32>()};
}

}  // namespace
}  // namespace mha_ext::cpu
