// The bits of dropout, a vector of them at a time.
namespace mha_ext::cpu {
namespace {

// The keys of all rounds, in all lanes.
template <class U>
struct RoundKeys {
  U first[kPhiloxRounds], second[kPhiloxRounds];
  explicit RoundKeys(const Dropout& dropout) {
    uint32_t key0 = (uint32_t)dropout.seed[0], key1 = (uint32_t)dropout.seed[1];
    for (int i = 0; i < kPhiloxRounds; i++) {
      first[i] = U::set(key0);
      second[i] = U::set(key1);
      key0 = next_key(key0, kFirstStep);
      key1 = next_key(key1, kSecondStep);
    }
  }
};
template <class U>
U this_key(const U* key) {
  return *key;
}
template <class U>
const U* next_key(const U* key, uint32_t) {
  return key + 1;
}

// Two vectors side by side: one alone waits for its multiplications.
template <class U>
struct Twice {
  U first, second;
  static constexpr int kLanes = 2 * U::kLanes;
  static Twice set(uint32_t x) { return {U::set(x), U::set(x)}; }
  static Twice from(uint32_t x) { return {U::from(x), U::from(x + U::kLanes)}; }
};
template <class U>
[[gnu::always_inline]] inline void multiply(uint32_t factor, const Twice<U>& x, Twice<U>* high,
                                            Twice<U>* low) {
  multiply(factor, x.first, &high->first, &low->first);
  multiply(factor, x.second, &high->second, &low->second);
}
template <class U>
[[gnu::always_inline]] inline Twice<U> exclusive_or(const Twice<U>& a, const Twice<U>& b,
                                                    const U& c) {
  return {exclusive_or(a.first, b.first, c), exclusive_or(a.second, b.second, c)};
}
template <class U>
[[gnu::always_inline]] inline void at_least(const Twice<U>& x, uint32_t t, uint64_t* low,
                                            uint64_t* high) {
  uint64_t low2, high2;
  at_least(x.first, t, low, high);
  at_least(x.second, t, &low2, &high2);
  *low |= low2 << U::kLanes;
  *high |= high2 << U::kLanes;
}

// kept[j] |= bits << at: bit i says whether key j of lane i's group of eight, for its query,
// survives dropout. Groups and queries are in global positions.
template <class Lanes, class U>
[[gnu::always_inline]] inline void draw_lanes(const Attention& a, int64_t b, int64_t h, Lanes group,
                                              Lanes query, const RoundKeys<U>& keys, int64_t at,
                                              uint64_t (&kept)[8]) {
  const Philox<Lanes> random =
      philox(group, query, Lanes::set((uint32_t)(a.origin.head + h)),
             Lanes::set((uint32_t)(a.origin.batch + b)), keys.first, keys.second);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    uint64_t low, high;
    at_least(random.word[i], a.dropout.threshold, &low, &high);
    kept[2 * i] |= low << at;
    kept[2 * i + 1] |= high << at;
  }
}

// Bit r of keep[j]: the pair (q0 + r, k0 + j) survives dropout.
template <class K>
void dropout_tile(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                  int64_t keys, uint64_t* keep) {
  using U = typename K::X::U;
  const int64_t first = a.origin.key + k0;
  const RoundKeys<U> round_keys(a.dropout);
  for (int64_t group = first >> 3; group <= (first + keys - 1) >> 3; group++) {
    uint64_t kept[8] = {};
    const auto draw = [&]<class Lanes>(int64_t r, Lanes query) __attribute__((always_inline)) {
      draw_lanes(a, b, h, Lanes::set((uint32_t)group), query, round_keys, r, kept);
    };
    const uint32_t query = (uint32_t)(a.origin.query + q0);
    int64_t r = 0;
    if constexpr (K::X::kRegisters == 32)
      for (; r + U::kLanes < rows; r += 2 * U::kLanes) draw(r, Twice<U>::from(query + (uint32_t)r));
    for (; r < rows; r += U::kLanes) draw(r, U::from(query + (uint32_t)r));
    const int64_t offset = group * 8 - first;
    for (int64_t i = max_of(0, -offset); i < min_of(8, keys - offset); i++)
      keep[offset + i] = kept[i];
  }
}

// Bit c of byte r becomes bit r of byte c.
inline uint64_t turn_bytes(uint64_t x) {
  const auto swap = [&](int shift, uint64_t mask) {
    const uint64_t both = (x ^ x >> shift) & mask;
    x ^= both ^ both << shift;
  };
  swap(7, 0x00AA00AA00AA00AAull);
  swap(14, 0x0000CCCC0000CCCCull);
  swap(28, 0x00000000F0F0F0F0ull);
  return x;
}

// The same for one query: bit n, its pair with key k0 + n survives.
template <class K>
uint64_t dropout_row(const Attention& a, int64_t b, int64_t h, int64_t q, int64_t k0,
                     int64_t keys) {
  using U = typename K::X::U;
  const int64_t first = a.origin.key + k0, offset = first & 7, groups = ceil_div(offset + keys, 8);
  const RoundKeys<U> round_keys(a.dropout);
  const U query = U::set((uint32_t)(a.origin.query + q));
  uint64_t kept[8] = {};
  for (int64_t i = 0; i < groups; i += U::kLanes)
    draw_lanes(a, b, h, U::from((uint32_t)((first >> 3) + i)), query, round_keys, i, kept);
  uint64_t keep = 0, last = 0;  // of the first eight groups, and of the ninth
  for (int i = 0; i < 8; i++) {
    keep |= (kept[i] & 0xff) << 8 * i;
    last |= (kept[i] >> 8 & 1) << i;
  }
  keep = turn_bytes(keep) >> offset;
  return (offset ? keep | last << (64 - offset) : keep) & first_bits(keys);
}

// Bit n of keep[r]: the pair (q0 + r, k0 + n) of 64 keys survives. Room for whole vectors of rows.
template <class K>
void dropout_rows(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                  uint64_t* keep) {
  using U = typename K::X::U;
  const int64_t first = a.origin.key + k0;
  if constexpr (requires { U::groups_of_rows(0u); }) {
    if (first % 8 == 0) {
      const RoundKeys<U> keys(a.dropout);
      const U head = U::set((uint32_t)(a.origin.head + h)),
              batch = U::set((uint32_t)(a.origin.batch + b)),
              group = U::groups_of_rows((uint32_t)(first >> 3));
      const uint32_t query = (uint32_t)(a.origin.query + q0);
      for (int64_t r = 0; r < rows; r += 4) {
        const Twice<U> queries{U::rows_of_groups(query + (uint32_t)r),
                               U::rows_of_groups(query + (uint32_t)r + 2)};
        const Philox<Twice<U>> random =
            philox(Twice<U>{group, group}, queries, Twice<U>{head, head}, Twice<U>{batch, batch},
                   keys.first, keys.second);
        U one[4], two[4];
        for (int i = 0; i < 4; i++) {
          one[i] = random.word[i].first;
          two[i] = random.word[i].second;
        }
        rows_at_least(one, a.dropout.threshold, keep + r);
        rows_at_least(two, a.dropout.threshold, keep + r + 2);
      }
      return;
    }
  }
  for (int64_t r = 0; r < rows; r++) keep[r] = dropout_row<K>(a, b, h, q0 + r, k0, kTile);
}

}  // namespace
}  // namespace mha_ext::cpu
