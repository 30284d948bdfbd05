// Dropout as a pure function of position: Philox4x32-10 (Salmon et al., SC 2011), written over the
// lane type. A lane type U has free functions multiply(factor, x, &high, &low) and
// exclusive_or(a, b, c).
#pragma once
#include "attention.h"

namespace mha_ext {

template <class U>
struct Philox {
  U word[4];
};

constexpr int kPhiloxRounds = 10;

// The keys of the first round are the seed's words; those of a round become those of the next.
constexpr uint32_t kFirstStep = 0x9E3779B9u, kSecondStep = 0xBB67AE85u;
HOST_DEVICE uint32_t this_key(uint32_t key) { return key; }
HOST_DEVICE uint32_t next_key(uint32_t key, uint32_t step) { return key + step; }

HOST_DEVICE void multiply(uint32_t factor, uint32_t x, uint32_t* high, uint32_t* low) {
  const uint64_t product = (uint64_t)factor * x;
  *high = (uint32_t)(product >> 32);
  *low = (uint32_t)product;
}
HOST_DEVICE uint32_t exclusive_or(uint32_t a, uint32_t b, uint32_t c) { return a ^ b ^ c; }

// Key: uint32_t, or what has this_key and next_key as well.
template <class U, class Key>
HOST_DEVICE Philox<U> philox(U c0, U c1, U c2, U c3, Key key0, Key key1) {
  for (int round = 0; round < kPhiloxRounds; round++) {
    U high0, low0, high1, low1;
    multiply(0xD2511F53u, c0, &high0, &low0);
    multiply(0xCD9E8D57u, c2, &high1, &low1);
    c0 = exclusive_or(high1, c1, this_key(key0));
    c1 = low1;
    c2 = exclusive_or(high0, c3, this_key(key1));
    c3 = low0;
    key0 = next_key(key0, kFirstStep);
    key1 = next_key(key1, kSecondStep);
  }
  return {{c0, c1, c2, c3}};
}

// A pair is dropped where its 16-bit lane is below this, and what is kept is multiplied by
// keep_scale.
HOST_DEVICE uint32_t drop_threshold(double dropout_p) {
  return (uint32_t)fmin(nearbyint(65536.0 * dropout_p), 65535.0);
}
HOST_DEVICE double keep_scale(uint32_t threshold) { return 65536.0 / (65536.0 - threshold); }

// Whether pair (q, k) of head h of batch entry b is kept; all in global positions, mod 2^32.
HOST_DEVICE bool keeps(const Dropout& dropout, int64_t b, int64_t h, int64_t q, int64_t k) {
  const Philox<uint32_t> random = philox((uint32_t)(k >> 3), (uint32_t)q, (uint32_t)h, (uint32_t)b,
                                         (uint32_t)dropout.seed[0], (uint32_t)dropout.seed[1]);
  return (random.word[(k & 7) >> 1] >> (k & 1 ? 16 : 0) & 0xffff) >= dropout.threshold;
}

}  // namespace mha_ext
