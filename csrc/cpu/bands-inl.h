// Tiles that a corner or a window cuts (or a length, where keys that it hides are there): each band
// of queries has a range of keys of its own, and what lies outside needs no arithmetic.
namespace mha_ext::cpu {
namespace {

// Where a tile is cut so, each band of so many queries needs a range of its keys only.
template <class K>
constexpr int64_t kBandQueries = K::kLanes > 8 ? 2 * K::kLanes : 16;
constexpr int64_t kBandKeys = 16, kMostBands = kTile / 16;

// The keys of each band, counted from the tile's first, in whole units; false where every band
// needs all of them, or where the products take whole tiles anyway.
template <class K>
bool find_bands(const Attention& a, int64_t b, int64_t q0, int64_t rows, int64_t k0, int64_t keys,
                Range* bands) {
  if constexpr (K::Dot::kRowBlock > 1) return false;
  const Range all = seen_by_all(a, b, q0, q0 + rows - 1);
  if (all.begin <= k0 && k0 + keys <= all.end) return false;
  for (int64_t r = 0; r < rows; r += kBandQueries<K>) {
    const Range any = seen_by_any(a, b, q0 + r, min_of(q0 + r + kBandQueries<K>, q0 + rows) - 1);
    const int64_t begin = max_of(0, any.begin - k0) / K::Dot::kStep * K::Dot::kStep;
    const int64_t end = min_of(keys, round_up(max_of(0, any.end - k0), K::Dot::kStep));
    bands[r / kBandQueries<K>] = begin < end ? Range{begin, end} : Range{0, 0};
  }
  return true;
}

// f(keys, first vector, vectors) for each band, or once for the whole tile where there are none.
template <class K, class F>
void for_bands(const Range* bands, int64_t keys, int64_t vectors, const F& f) {
  constexpr int64_t kVectors = kBandQueries<K> / K::kLanes;
  if (!bands) return f(Range{0, keys}, (int64_t)0, vectors);
  for (int64_t i = 0; i < vectors; i += kVectors)
    f(bands[i / kVectors], i, min_of(kVectors, vectors - i));
}

// f(keys, queries) for each kBandKeys keys: which queries need any of them.
template <class K, class F>
void for_band_keys(const Range* bands, int64_t keys, int64_t rows, const F& f) {
  if (!bands) return f(Range{0, keys}, Range{0, rows});
  for (int64_t n = 0; n < keys; n += kBandKeys) {
    const Range some{n, min_of(keys, n + kBandKeys)};
    Range queries{rows, 0};
    for (int64_t r = 0; r < rows; r += kBandQueries<K>) {
      const Range band = bands[r / kBandQueries<K>];
      if (band.begin >= some.end || band.end <= some.begin) continue;
      queries = {min_of(queries.begin, r), min_of(rows, r + kBandQueries<K>)};
    }
    f(some, queries.begin < queries.end ? queries : Range{0, 0});
  }
}

// Whether the scores of whole tiles of keys are multiplied in limbs, for a block of so many
// queries: more of them than a vector, a width for which that is less work, and as many tiles as
// what is cut for them is worth; two limbs are sooner worth it than three. One limb always is.
template <class K>
bool takes_limbs(const Attention& a, int64_t rows) {
  if (K::kOneLimb) return !has_few_queries(a, K::kLimits);
  if (!K::kLimbs || rows <= K::kLanes || a.head_dim < K::kLanes || a.head_dim > 512) return false;
  constexpr int64_t kTiles = K::kLimbs == 3 ? 4 : 2;
  const Band& band = a.band;
  if (!band.left_bounded && !band.right_bounded) return a.keys >= kTiles * kTile;
  const bool window = band.left_bounded && band.right_bounded;
  const int64_t seen = min_of(band.left, a.keys) + min_of(band.right, a.keys) + 1;
  return min_of(a.keys, window ? seen : a.keys) >= 2 * kTiles * kTile;
}
// Of which tiles: the same in all passes, since P is the exponential of a difference to lse, and
// for each row of a block whatever others come with it.
template <class K>
bool in_limbs(const Attention& a, int64_t b, int64_t query, int64_t k0, int64_t keys) {
  if (K::kOneLimb) return takes_limbs<K>(a, a.queries);
  const int64_t q0 = query / kTile * kTile, rows = min_of(kTile, a.queries - q0);
  Range bands[kMostBands];
  return keys == kTile && takes_limbs<K>(a, rows) &&
         !find_bands<K>(a, b, q0, rows, k0, keys, bands);
}

}  // namespace
}  // namespace mha_ext::cpu
