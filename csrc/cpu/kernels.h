// The seam of the CPU: torch above it, raw pointers below. No torch and no standard library here.
// One instruction set is one table of functions; kernels.cpp lists the tables and picks one.
#pragma once
#include "../spec/attention.h"
#include "../spec/linear.h"
#include "../spec/mask.h"

namespace mha_ext::cpu {

// A piece of the backward: one key range of one key/value head.
// The keys are cut the same way whatever the number of threads, and the ranges' grad_query is added
// in order.
struct KeyRanges {
  int64_t count, size;
};
HOST_DEVICE KeyRanges key_ranges(const Attention& a) {
  const int64_t size = max_of(256, ceil_div(ceil_div(a.keys, 8), kTile) * kTile);
  return {max_of(1, ceil_div(a.keys, size)), size};
}

// The same for the backward of first order, finer: a call takes several ranges one after the other
// and adds their sums in order, so that fine ranges cost little; with few heads each range can be a
// task of its own.
HOST_DEVICE KeyRanges grad_ranges(const Attention& a) {
  const int64_t size = max_of(1, ceil_div(ceil_div(a.keys, 8), kTile)) * kTile;
  return {max_of(1, ceil_div(a.keys, size)), size};
}
// How many of them a call takes at most: as many as a second-level cache holds keys, values and
// their gradients of. A call goes through all blocks of queries, and packs each once.
HOST_DEVICE int64_t ranges_together(const Attention& a) {
  constexpr int64_t kCacheNumbers = 1 << 18;
  const int64_t range = 2 * (a.head_dim + a.value_dim) * grad_ranges(a).size;
  return max_of(1, min_of(kCacheNumbers / max_of(1, range), grad_ranges(a).count));
}
// The ranges [first, last) of one key/value head that one call takes. `apart`: their sums stay
// apart, for add_sums; else they are added to those of the ranges before, and the last call of a
// head writes grad_query. `begins_bias`: of those that add to sums of grad_bias it is the first,
// and writes them.
struct KeyPart {
  int64_t first, last;
  bool apart;
  bool begins_bias = false;
};
// Such a call meets each block of queries of its head, and nobody else does: it computes delta,
// too, unless grad_weights is what backward starts from.
HOST_DEVICE bool is_whole_head(const Attention& a, KeyPart part) {
  return part.first == 0 && part.last == grad_ranges(a).count && !part.apart;
}
// Numbers of the grad_query of 64 queries as it is summed: [head_dim][64], in whole rows of a
// matrix unit.
HOST_DEVICE int64_t query_sum_size(const Attention& a) {
  return ceil_div(a.head_dim, 16) * 16 * kTile;
}

// Forward cuts the keys of few queries and many keys, so that a single head keeps many threads
// busy: where, depends on the two lengths alone. Each range has its own maximum, sum and output;
// they are merged in order.
HOST_DEVICE KeyRanges forward_ranges(const Attention& a) {
  const int64_t blocks = max_of(1, ceil_div(a.queries, kTile));
  const int64_t size = max_of(512 * blocks, ceil_div(ceil_div(a.keys, 64), kTile) * kTile);
  return {max_of(1, ceil_div(a.keys, size)), size};
}
constexpr int64_t kEveryRange = -1;

// How few queries of a head, and how short heads, have kernels of their own; a constant of each
// type.
struct KernelLimits {
  int64_t few_queries;       // over more keys than a tile has; over fewer, kFewest
  int64_t one_tile_queries;  // over no more keys than a tile has
  int64_t lanes;             // of a vector
  int64_t rows_in_order;     // of a head, that a call reads in its order where whole_vectors()
  int64_t grouped_queries;   // of a head, so many at most share a block with those of other heads
};
// Where queries are few, the rows of all heads that share K and V are taken together, so many at
// most; by forward in smaller parts, down to kFewPart, where that leaves threads without a task.
constexpr int64_t kFewest = 4, kFewRows = 128, kFewPart = 32;
// Then scores are sums over lanes, as those of few rows are: in all passes, since P = exp(S - lse)
// is right only for the S that lse was made of. (A row's sum does not depend on the others.)
HOST_DEVICE bool has_few_queries(const Attention& a, const KernelLimits& limits) {
  return a.queries > 0 && a.queries <= (a.keys > kTile ? limits.few_queries : kFewest);
}
// Rows that share K and V: the queries of a group of heads.
HOST_DEVICE int64_t group_rows(const Attention& a) {
  return a.heads / max_of(1, a.kv_heads) * a.queries;
}
// Whether forward fills the lanes of its blocks with the queries of all heads that share K and V:
// where those of one are less than a tile, and together enough; of few queries, whose scores are
// sums over lanes, which cost more there, where these leave few lanes empty.
HOST_DEVICE bool takes_groups(const Attention& a, const KernelLimits& limits) {
  constexpr int64_t kEnough = 28, kEnoughFew = 32;
  if (a.heads <= a.kv_heads || a.queries > limits.grouped_queries || a.keys <= kTile) return false;
  const int64_t rows = group_rows(a);
  if (!has_few_queries(a, limits)) return rows >= kEnough;
  const int64_t lanes = ceil_div(rows, limits.lanes) * limits.lanes;
  return rows >= kEnoughFew && 6 * rows >= 5 * lanes;
}
HOST_DEVICE int64_t item_size(const Attention& a) {
  return a.dtype == DType::kFloat64 ? 8 : a.dtype == DType::kFloat32 ? 4 : 2;
}
// How many key/value heads such a call takes together: those that lie side by side in a page, all
// rows of them, unless these are so many that they fill a cache.
HOST_DEVICE int64_t few_heads(const Attention& a) {
  constexpr int64_t kPage = 4096;
  const bool side_by_side = a.key.head < a.key.row && a.value.head < a.value.row;
  if (!side_by_side || group_rows(a) > kFewPart) return 1;
  const int64_t width = max_of(1, max_of(a.head_dim, a.value_dim)) * item_size(a);
  return max_of(1, min_of(kPage / width, a.kv_heads));
}
// Whether this is one of AMD's processors that take 512 bits at once, from Zen 5 on. There products
// leave less time to bring what they read again, and few queries leave time enough to ask for lines
// one by one, in the order in which they are read.
bool whole_vectors();
// Whether a call reads one head that lies dense for one row, or as few as that is better for: then
// in the order of its memory.
[[maybe_unused]] static inline bool few_in_order(const Attention& a, int64_t kv_heads, int64_t rows,
                                                 const KernelLimits& limits) {
  return kv_heads == 1 && rows <= (whole_vectors() ? limits.rows_in_order : 1) &&
         a.key.row == a.head_dim && a.value.row == a.value_dim;
}

enum class ForwardKernel { kFew, kGrouped, kOneTile, kTiled };
// Whether all keys fit into one tile; where the products are of pairs, for no more than
// one_tile_queries queries, since they are not for a few lanes.
HOST_DEVICE bool fits_one_tile(const Attention& a, const KernelLimits& limits) {
  return a.keys <= kTile && a.queries <= limits.one_tile_queries;
}
HOST_DEVICE ForwardKernel forward_kernel(const Attention& a, const KernelLimits& limits) {
  if (takes_groups(a, limits)) return ForwardKernel::kGrouped;
  if (has_few_queries(a, limits) && a.heads > 0) return ForwardKernel::kFew;
  return fits_one_tile(a, limits) ? ForwardKernel::kOneTile : ForwardKernel::kTiled;
}

// How many short heads a call of one tile takes at most: as many as have room for their queries in
// the lanes of a tile, whole vectors each, and for their pairs in the nearest cache.
HOST_DEVICE int64_t heads_together(const Attention& a, const KernelLimits& limits) {
  const int64_t pairs = a.dtype == DType::kFloat64 ? 1024 : 2048;  // 8 KB
  const int64_t lanes = ceil_div(max_of(1, a.queries), limits.lanes) * limits.lanes;
  return max_of(1, min_of(kTile, pairs / max_of(1, a.keys)) / lanes);
}

// kFew: so few rows share K and V that one call takes all of them; where forward takes groups, also
// of more queries a head, but less than two vectors.
// kOneTile: the queries of a head, too, are one tile, and no other head shares the keys. Then
// backward computes delta itself, unless grad_weights is what it starts from. Of three or four
// queries over few keys, too: that has less to prepare.
enum class BackwardKernel { kFew, kOneTile, kTiled };
HOST_DEVICE BackwardKernel backward_kernel(const Attention& a, const AttentionGrad& g,
                                           const KernelLimits& limits) {
  constexpr int64_t kShort = 16;
  const bool one_tile = fits_one_tile(a, limits) && a.queries <= kTile && a.heads == a.kv_heads;
  const bool grouped = takes_groups(a, limits) && a.queries < 2 * limits.lanes;
  const bool few = (grouped || has_few_queries(a, limits)) && a.kv_heads > 0 &&
                   group_rows(a) <= kFewRows && !g.grad_weights.data;
  if (few && !(one_tile && a.queries > 2 && a.keys <= kShort)) return BackwardKernel::kFew;
  return one_tile ? BackwardKernel::kOneTile : BackwardKernel::kTiled;
}

// Whether each pair has its own bias: then backward writes dS itself and no sum is left.
HOST_DEVICE bool bias_is_dense(const Attention& a, const Pairs& grad_bias) {
  return (grad_bias.batch || a.batch == 1) && (grad_bias.head || a.heads == 1) &&
         (grad_bias.query || a.queries == 1) && (grad_bias.key || a.keys == 1);
}

// Whether no tile of pairs is passed over, so that what is written of each need not be cleared
// before.
HOST_DEVICE bool meets_all_tiles(const Attention& a) { return !a.mask.data && hides_nothing(a); }

// How the backward of first order adds dS to the gradient of a bias that broadcasts over the batch
// or the heads: those that share an element take turns. A batch that does may be cut into shares,
// with sums of their own, so that there are tasks enough. Nothing here depends on the threads, nor,
// where the bias has a batch of its own, on its size.
struct BiasShares {
  int64_t count = 0;        // 0: the sum is left to others
  int64_t batch_turns = 1;  // batch entries that take turns: those of a share, or one
  bool apart = false;       // the sums are beside grad_bias, in their own type
  int64_t bytes = 0;        // of those of a share, of one batch entry
};
HOST_DEVICE BiasShares bias_shares(const Attention& a, const Pairs& grad_bias) {
  constexpr int64_t kLeast = 8, kEnough = 64;  // tasks
  constexpr int64_t kTurns = 8;  // that a share is worth, where there are tasks enough
  // Bytes of the sums; the second where their type is wider than the gradient's, so that one share
  // has some, too.
  constexpr int64_t kMost = (int64_t)1 << 25, kMostOfWider = (int64_t)1 << 28;
  constexpr double kFlopsWorthATask = 1e6;
  BiasShares shares;
  if (!grad_bias.data || bias_is_dense(a, grad_bias) || (!grad_bias.query && a.queries > 1) ||
      (!grad_bias.key && a.keys > 1))
    return shares;
  const bool is_double = a.dtype == DType::kFloat64;
  const bool own_type =
      is_double ? !a.bias_is_float32 : a.bias_is_float32 || a.dtype == DType::kFloat32;
  const int64_t tasks = (grad_bias.head ? a.kv_heads : 1) * grad_ranges(a).count;
  const int64_t batch = grad_bias.batch ? 1 : a.batch;
  if (batch * tasks < kLeast) return shares;
  shares.bytes = (grad_bias.head ? a.heads : 1) * a.queries * a.keys * (is_double ? 8 : 4);
  const double flops = 10.0 * (double)(batch * a.heads * a.queries) *
                       (double)(a.keys * max_of(a.head_dim, a.value_dim));
  const int64_t enough =
      flops < kEnough * kFlopsWorthATask ? (int64_t)(flops / kFlopsWorthATask) : kEnough;
  const int64_t least = ceil_div(kLeast, tasks);
  const int64_t wanted = max_of(least, min_of(ceil_div(enough, tasks), batch / kTurns));
  const int64_t most = max_of(kMost, own_type ? 0 : min_of(shares.bytes, kMostOfWider));
  const int64_t fit = max_of(1, most / max_of(1, shares.bytes));
  shares.batch_turns = max_of(1, batch / wanted);
  if (ceil_div(batch, shares.batch_turns) > fit) shares.batch_turns = ceil_div(batch, fit);
  shares.count = ceil_div(batch, shares.batch_turns);
  shares.apart = shares.count > 1 || !own_type;
  if (shares.count < least || (shares.apart && shares.count * shares.bytes > most)) return {};
  return shares;
}

// A tile of the bias' gradient and the share of the sum over the broadcast dimensions that one task
// adds up.
struct BiasPlan {
  int64_t batches, heads, query_tiles, key_tiles;  // owners: distinct tiles of the bias
  int64_t chunks;                                  // shares of each owner's sum
};

// Blocks of 64 queries that the tangent of forward takes together.
constexpr int64_t kTangentGroup = 8;

struct TypeKernels {
  int64_t element_size;  // of what is accumulated: 4, or 8 for float64
  // Bytes of scratch, 64-byte aligned, that one thread needs: for forward and weights, and for the
  // others.
  int64_t (*forward_scratch_bytes)(const Attention& a);
  int64_t (*backward_scratch_bytes)(const Attention& a);
  int64_t (*forward_tangent_scratch_bytes)(const Attention& a);
  int64_t (*backward_tangent_scratch_bytes)(const Attention& a);
  // Blocks of 64 queries that forward does best together, and whether what they share is dear: K
  // and V are packed for a matrix unit.
  int64_t (*group)(const Attention& a);
  bool (*packs)(const Attention& a);
  KernelLimits limits;
  // Queries [q0, q0 + rows), rows <= 64 group(a), of head h of batch entry b: out, lse and lse_low.
  // For one of forward_ranges (rows <= 64): its state, into states[range], each of state_bytes.
  void (*forward)(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t range,
                  void* states, void* scratch);
  // The same for heads [first, first + count), numbered b * heads + h, all of their queries: as
  // many as heads_together says at most, where kOneTile takes them.
  void (*forward_heads)(const Attention& a, int64_t first, int64_t count, void* scratch);
  // out, lse and lse_low from the states of all ranges, which are overwritten: the same to the bit
  // as forward with kEveryRange.
  void (*merge)(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, void* states,
                void* scratch);
  // The same for rows [first, first + rows), rows <= kFewRows, of the heads of each of kv_heads
  // key/value heads (at most few_heads) from kv_head on, row = (head, query). Where takes_groups,
  // those of one key/value head, rows <= 64 group(a), or 64 of one range.
  void (*forward_few)(const Attention& a, int64_t b, int64_t kv_head, int64_t kv_heads,
                      int64_t first, int64_t rows, int64_t range, void* states, void* scratch);
  void (*merge_few)(const Attention& a, int64_t b, int64_t kv_head, int64_t kv_heads, int64_t first,
                    int64_t rows, void* states, void* scratch);
  int64_t (*state_bytes)(const Attention& a);  // whichever of the two takes this problem
  // delta = rowsum(dO * O) - dL for queries [64 block, …).
  void (*delta)(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t block);
  // grad_key and grad_value of the keys of `part`, and their share of grad_query. `sums`: room for
  // that of [heads / kv_heads][ranges if apart][blocks of 64 queries], query_sum_size(a) numbers
  // each; not needed where one part has all ranges. Writes delta where is_whole_head says so.
  void (*backward)(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv_head,
                   KeyPart part, void* sums, void* scratch);
  // The same for heads [first, first + count), numbered b * heads + h, as many as heads_together
  // says at most, where kOneTile takes them.
  void (*backward_heads)(const Attention& a, const AttentionGrad& g, int64_t first, int64_t count,
                         void* scratch);
  // grad_query of 64 queries from the sums [ranges][blocks] of head h. A sum is as `backward` has
  // left it: [head_dim][64], or [queries][few_width] where it takes few.
  void (*add_sums)(const Attention& a, const AttentionGrad& g, void* sums, int64_t b, int64_t h,
                   int64_t block);
  // grad_query of 64 queries from the partial sums [ranges, queries, head_dim] of head h.
  void (*add_ranges)(const Attention& a, const AttentionGrad& g, const void* partial, int64_t b,
                     int64_t h, int64_t block);
  // One share of one owner's sum into a tile [64 keys, 64 queries] of `sums`.
  void (*bias_share)(const Attention& a, const AttentionGrad& g, const BiasPlan& plan,
                     int64_t owner, int64_t chunk, void* sums, void* scratch);
  // The shares of one owner, added in order, into grad_bias.
  void (*bias_finish)(const Attention& a, const AttentionGrad& g, const BiasPlan& plan,
                      int64_t owner, void* sums, void* scratch);
  // The tangent of forward for queries [q0, q0 + rows), rows <= 64 kTangentGroup: t.out and t.lse.
  void (*forward_tangent)(const Attention& a, const AttentionTangent& t, int64_t b, int64_t h,
                          int64_t q0, int64_t rows, void* scratch);
  // t.delta for queries [64 block, …), where grad_out, out or grad_lse has a tangent.
  void (*delta_tangent)(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                        int64_t b, int64_t h, int64_t block);
  // The tangents of what backward and bias_share compute.
  void (*backward_tangent)(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                           int64_t b, int64_t kv_head, int64_t range, void* partial, void* scratch);
  void (*bias_share_tangent)(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                             const BiasPlan& plan, int64_t owner, int64_t chunk, void* sums,
                             void* scratch);
  // P of queries [q0, q0 + rows), rows <= 64, of head h of batch entry b, into out [rows, keys],
  // contiguous rows, of all that has `bytes`.
  void (*weights)(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, void* out,
                  int64_t bytes, void* scratch);
  // Runs the multiply-add that carries this type `count` times on independent registers; returns
  // the FLOPs.
  double (*multiply_add)(int64_t count);
};

// The product of a linear layer, block by block of the result, and the sizes of these. A panel of
// 64 columns and so many terms stays in the nearest cache.
constexpr int64_t kLinearRows = 252, kLinearColumns = 512, kLinearDepth = 192;

struct LinearKernel {
  int64_t rows, columns;  // of a block, at most
  int64_t row_step;       // what the inner loops take whole
  int64_t least_rows;     // of a block that is one of two, to keep more threads busy
  int64_t tasks;          // for each thread
  bool square;            // rows are copied for each block, as columns are
  int64_t (*scratch_bytes)(int64_t rows, int64_t depth);
  // Rows [m0, m0 + rows) and columns [n0, n0 + columns) of the result.
  void (*run)(const Linear& p, int64_t m0, int64_t rows, int64_t n0, int64_t columns,
              void* scratch);
};

// Sums of so many terms are long.
constexpr int64_t kLongSum = 32;

struct Kernels {
  const char* name;
  TypeKernels types[kDTypes];  // by DType
  LinearKernel linear, long_linear;
};

const Kernels& active_kernels();
[[maybe_unused]] static inline const TypeKernels& kernels_for(const Attention& a) {
  return active_kernels().types[(int)a.dtype];
}

int isa_count();
const char* isa_name(int index);  // 0 = best
bool isa_supported(int index);
const char* active_isa();
bool select_isa(const char* name);  // nullptr = best supported; false if unknown or unsupported
void set_whole_vectors(bool yes);   // for tests of whole_vectors() on other processors

double fma_peak(DType type, double seconds);  // FLOP/s of one thread
// Bytes a second of so many threads at once, in `bytes` bytes of all of them: read and written, and
// read.
double copy_bandwidth(int64_t bytes, double seconds, int threads);
double read_bandwidth(int64_t bytes, double seconds, int threads);

}  // namespace mha_ext::cpu
