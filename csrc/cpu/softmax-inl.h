// Softmax of a tile of scores with a running maximum m and sum l (Milakov & Gimelshein 2018):
//   P = exp(S - m), in place or rounded into pairs of keys; m is raised, and what was summed with
//   the old one rescaled, only where a score lies far above it.
namespace mha_ext::cpu {
namespace {

// How far a score may lie above what exp subtracts.
template <class T>
constexpr T kSlack = (T)5.5;

// What hides pairs of a tile: bit `first` + r of bits[key] says whether query r sees it. Nothing
// where there are no bits.
struct Seen {
  const uint64_t* bits = nullptr;
  int64_t first = 0;
  Seen from(int64_t key, int64_t lane) const { return {bits ? bits + key : nullptr, first + lane}; }
};
// v, or `otherwise` where vector i of the queries does not see the key.
template <class X, bool kMasked>
[[gnu::always_inline]] inline typename X::V seen_or(Seen seen, int64_t key, int i, typename X::V v,
                                                    typename X::V otherwise) {
  if constexpr (!kMasked) return v;
  return X::select(X::mask(seen.bits[key] >> (seen.first + i * X::kLanes)), v, otherwise);
}

// The largest scores of NV vectors of queries: those of `known`, where it is set.
template <class K, int NV, bool kMasked>
void find_tops(int64_t keys, const typename K::T* s, const typename K::T* known, Seen seen,
               typename K::X::V (&found)[NV]) {
  using X = typename K::X;
  if (known) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) found[i] = X::load(known + i * K::kLanes);
    return;
  }
  typename X::V top[2][NV];  // of even and of odd keys
  const typename X::V lowest = X::set(-(typename K::T)INFINITY);
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) top[0][i] = top[1][i] = lowest;
  const auto raise = [&](int which, int i, int64_t n) __attribute__((always_inline)) {
    const typename X::V score = X::load(s + n * kRow + i * K::kLanes);
    top[which][i] = X::max(seen_or<X, kMasked>(seen, n, i, score, lowest), top[which][i]);
  };
  int64_t n = 0;
  for (; n + 2 <= keys; n += 2)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) {
      raise(0, i, n);
      raise(1, i, n + 1);
    }
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    if (n < keys) raise(0, i, n);
    found[i] = X::max(top[0][i], top[1][i]);
  }
}

// m[r] -> the maximum with these scores, where it grows by more than 5.5: then l and the output are
// rescaled. `known`: the largest scores, those of hidden pairs too; mostly no level has to be
// raised for these, and nobody has to look at what is seen. For NV vectors of queries:
template <class K, int NV, bool kMasked>
void raise_levels(int64_t keys, const typename K::T* s, const typename K::T* known, Seen seen,
                  typename K::T* m, typename K::T* l, typename K::T* out, int64_t value_dim) {
  using X = typename K::X;
  using V = typename X::V;
  const V slack = X::set(kSlack<typename K::T>);
  if (kMasked && known) {
    uint64_t grows = 0;
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++)
      grows |=
          X::bits(X::gt(X::sub(X::load(known + i * K::kLanes), X::load(m + i * K::kLanes)), slack));
    if (!grows) return;
    known = nullptr;
  }
  V top[NV];
  find_tops<K, NV, kMasked>(keys, s, known, seen, top);
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    const V old = X::load(m + i * K::kLanes);
    const typename X::M grows = X::gt(X::sub(top[i], old), slack);
    if (!X::bits(grows)) continue;
    const V raised = X::select(grows, top[i], old);
    X::store(m + i * K::kLanes, raised);
    const V factor = X::select(grows, exp_of<X>(X::sub(old, raised)), X::set(1));
    X::store(l + i * K::kLanes, X::mul(factor, X::load(l + i * K::kLanes)));
    typename K::T* o = out + i * K::kLanes;
    for (int64_t d = 0; d < value_dim; d++)
      X::store(o + d * kRow, X::mul(factor, X::load(o + d * kRow)));
  }
}

// What exp subtracts. A row that has seen nothing yet: -inf - -inf would be NaN.
template <class K>
typename K::X::V level_of(const typename K::T* m) {
  using X = typename K::X;
  const typename X::V level = X::load(m);
  return X::select(X::eq(level, X::set(-(typename K::T)INFINITY)), X::zero(), level);
}

// The levels of queries of which this is the first tile: nothing has to be rescaled.
template <class K, int NV, bool kMasked>
void first_levels(int64_t keys, const typename K::T* s, const typename K::T* known, Seen seen,
                  typename K::T* m) {
  using X = typename K::X;
  typename X::V top[NV];
  find_tops<K, NV, kMasked>(keys, s, kMasked ? nullptr : known, seen, top);
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) X::store(m + i * K::kLanes, top[i]);
}

// One tile of scores for NV vectors of queries: S -> P, adds P to l, or, where it is their first,
// makes m and l. `top`: the largest scores, where they are known. kDropout: P is 0 where the pair
// is not `kept`, and counts in l all the same.
template <class K, int NV, bool kMasked, bool kDropout, bool kFirst = false>
void softmax_lanes(int64_t keys, typename K::T* s, const typename K::T* top, Seen seen, Seen kept,
                   typename K::T* m, typename K::T* l, typename K::T* out, int64_t value_dim) {
  using X = typename K::X;
  using V = typename X::V;
  if constexpr (kFirst)
    first_levels<K, NV, kMasked>(keys, s, top, seen, m);
  else
    raise_levels<K, NV, kMasked>(keys, s, top, seen, m, l, out, value_dim);
  V level[NV], sum[2][NV];  // of even and of odd keys: shorter chains round less
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    level[i] = level_of<K>(m + i * K::kLanes);
    sum[0][i] = sum[1][i] = X::zero();
  }
  const auto exponentials = [&]<int kKeys>(int64_t key) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) {
      typename K::T* p = s + key * kRow + i * K::kLanes;
      V e[kKeys];
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) e[k] = X::sub(X::load(p + k * kRow), level[i]);
      exp_each<X, kKeys>(e);
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) {
        e[k] = seen_or<X, kMasked>(seen, key + k, i, e[k], X::zero());
        X::store(p + k * kRow, seen_or<X, kDropout>(kept, key + k, i, e[k], X::zero()));
        sum[k][i] = X::add(sum[k][i], e[k]);
      }
    }
  };
  int64_t n = 0;
  for (; n + 2 <= keys; n += 2) exponentials.template operator()<2>(n);
  if (n < keys) exponentials.template operator()<1>(n);
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    const V all = X::add(sum[0][i], sum[1][i]);
    X::store(l + i * K::kLanes, kFirst ? all : X::add(X::load(l + i * K::kLanes), all));
  }
}

// Whether a query has no level yet.
template <class K, int NV>
bool lacks_level(const typename K::T* m) {
  using X = typename K::X;
  uint64_t lacks = 0;
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++)
    lacks |= X::bits(X::eq(X::load(m + i * K::kLanes), X::set(-(typename K::T)INFINITY)));
  return lacks;
}

// The exponentials of all 64 keys for NV vectors of queries, two keys at a time: P comes as pairs
// of keys and is added to l, S stays. kTry: in the hope that no level has to be raised; false,
// where one has to: then l is as it was.
template <class K, int NV, bool kTry, bool kMasked, bool kDropout>
bool softmax_pairs_lanes(const typename K::T* s, Seen seen, Seen kept, const typename K::T* m,
                         typename K::T* l, typename K::Unit* pairs) {
  using T = typename K::T;
  using X = typename K::X;
  using V = typename X::V;
  // Masked, a query may see nothing here either.
  if (kTry && !kMasked && lacks_level<K, NV>(m)) return false;
  V level[NV], sum[2][NV], top[NV];
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    level[i] = level_of<K>(m + i * K::kLanes);
    sum[0][i] = sum[1][i] = X::zero();
    top[i] = X::set(-(T)INFINITY);
  }
  for (int64_t n = 0; n < kTile; n += 2)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) {
      V e[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        const V x = X::sub(X::load(s + (n + k) * kRow + i * K::kLanes), level[i]);
        if (kTry) top[i] = seen_or<X, kMasked>(seen, n + k, i, X::max(x, top[i]), top[i]);
        e[k] = seen_or<X, kMasked>(seen, n + k, i, exp_of<X>(x), X::zero());
        sum[k][i] = X::add(sum[k][i], e[k]);
      }
      K::Dot::store_pairs(seen_or<X, kDropout>(kept, n, i, e[0], X::zero()),
                          seen_or<X, kDropout>(kept, n + 1, i, e[1], X::zero()),
                          pairs + n / 2 * kRow + i * K::kLanes);
    }
  uint64_t grows = 0;
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    const V lowest = X::set(-(T)INFINITY);
    V most = X::set(kSlack<T>);
    if constexpr (kMasked)
      most = X::select(X::eq(X::load(m + i * K::kLanes), lowest), lowest, most);
    if (kTry) grows |= X::bits(X::gt(top[i], most));
  }
  if (grows) return false;
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++)
    X::store(l + i * K::kLanes, X::add(X::load(l + i * K::kLanes), X::add(sum[0][i], sum[1][i])));
  return true;
}

// run<NV>(lane) for each NV vectors of queries, of as many as leave registers for the exponential.
template <class K, class Run>
void by_vectors(int64_t vectors, const Run& run) {
  constexpr int kMost = K::X::kRegisters == 32 ? 4 : 1;
  int64_t lane = 0;
  for (; vectors >= kMost; vectors -= kMost, lane += kMost * K::kLanes)
    run.template operator()<kMost>(lane);
  for (; vectors > 0; vectors--, lane += K::kLanes) run.template operator()<1>(lane);
}

// Scores of pairs that are not seen may be anything; their P is 0, as is that of pairs which are
// not kept.
template <class K>
void softmax_tile(int64_t keys, int64_t vectors, typename K::T* s, const typename K::T* top,
                  Seen seen, Seen kept, typename K::T* m, typename K::T* l, typename K::T* out,
                  int64_t value_dim) {
  by_vectors<K>(vectors, [&]<int NV>(int64_t lane) {
    const auto run =
        seen.bits ? kept.bits ? softmax_lanes<K, NV, true, true> : softmax_lanes<K, NV, true, false>
        : kept.bits ? softmax_lanes<K, NV, false, true>
                    : softmax_lanes<K, NV, false, false>;
    run(keys, s + lane, top ? top + lane : nullptr, seen.from(0, lane), kept.from(0, lane),
        m + lane, l + lane, out + lane, value_dim);
  });
}

// The same for the first and only tile: m and l need not be set.
template <class K>
void softmax_one_tile(int64_t keys, int64_t vectors, typename K::T* s, const typename K::T* top,
                      Seen seen, typename K::T* m, typename K::T* l) {
  by_vectors<K>(vectors, [&]<int NV>(int64_t lane) {
    const auto run = seen.bits ? softmax_lanes<K, NV, true, false, true>
                               : softmax_lanes<K, NV, false, false, true>;
    run(keys, s + lane, top ? top + lane : nullptr, seen.from(0, lane), {}, m + lane, l + lane,
        nullptr, 0);
  });
}

// run<kMasked, kDropout>()
template <class Run>
void by_masks(Seen seen, Seen kept, const Run& run) {
  if (seen.bits)
    kept.bits ? run.template operator()<true, true>() : run.template operator()<true, false>();
  else
    kept.bits ? run.template operator()<false, true>() : run.template operator()<false, false>();
}
// The same to the bit, rounded as tile_vectors rounds P.
template <class K>
void softmax_pairs(int64_t vectors, bool started, typename K::T* s, Seen seen, Seen kept,
                   typename K::T* m, typename K::T* l, typename K::T* out, int64_t value_dim,
                   typename K::Unit* pairs) {
  by_masks(seen, kept, [&]<bool kMasked, bool kDropout>() {
    by_vectors<K>(vectors, [&]<int NV>(int64_t lane) {
      const Seen sees = seen.from(0, lane), keeps = kept.from(0, lane);
      const auto exponentials = [&]<bool kTry>() {
        return softmax_pairs_lanes<K, NV, kTry, kMasked, kDropout>(s + lane, sees, keeps, m + lane,
                                                                   l + lane, pairs + lane);
      };
      if (started && exponentials.template operator()<true>()) return;
      raise_levels<K, NV, kMasked>(kTile, s + lane, nullptr, sees, m + lane, l + lane, out + lane,
                                   value_dim);
      exponentials.template operator()<false>();
    });
  });
}

}  // namespace
}  // namespace mha_ext::cpu
