// Paged attention for decoding: one query token per request, keys and values in blocks.
//
// One source without any include, built as it stands by NVRTC, by nvcc and, with KV_EMULATED defined and a shim in
// front, by a C++17 compiler. All kernels are templates; an `extern "C"` instance per variant is appended to this text
// (kvplan/kernels/variants.py). Docs: docs/kernel.md.
//
//   naive_attention      one block of threads per (request, query head), scores in shared memory: the baseline
//   split_attention      CUDA cores; a work item is (request, KV head, chunk of tokens)
//   mma_attention        tensor cores; the same work items
//   merge_partials       puts the chunks of a request together
//   reshape_and_cache    writes new keys and values into their slots
//   copy_blocks          copy-on-write, all layers in one launch
//
// Every read of global memory is `ldg` or `ldg128`, every write `stg` or `stg128`. An instance is
//   extern "C" __global__ void __launch_bounds__(THREADS) NAME(const PagedAttentionParams p) { KERNEL<...>(p); }
// and is launched with THREADS threads and the bytes of shared memory that the kernel's comment says.

// ---------------------------------------------------------------------------------------------------------------------
// What only a GPU has. With KV_EMULATED the shim in front of this text provides the names marked "shim:".
// ---------------------------------------------------------------------------------------------------------------------

#define KV_UNROLL _Pragma("unroll")

#ifndef KV_EMULATED

#define KV_SHARED(type, name)                 \
    extern __shared__ uint4 kv_shared_bytes[]; \
    type* name = reinterpret_cast<type*>(kv_shared_bytes)

// shim: ldg128. 16 bytes, which must be aligned to 16.
__device__ __forceinline__ uint4 ldg128(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// shim: ldg. One value of a plain type.
template <class T>
__device__ __forceinline__ T ldg(const T* address) {
    return *address;
}

template <>
__device__ __forceinline__ uint2 ldg(const uint2* address) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

template <>
__device__ __forceinline__ unsigned ldg(const unsigned* address) {
    unsigned v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

// shim: stg128.
__device__ __forceinline__ void stg128(void* address, uint4 v) {
    *reinterpret_cast<uint4*>(address) = v;
}

// shim: stg.
template <class T>
__device__ __forceinline__ void stg(T* address, T value) {
    *address = value;
}

// shim: sync_warps. A barrier of the block's, 1 to 15, for so many of its threads, whole warps; it orders their memory.
__device__ __forceinline__ void sync_warps(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// The address as it is: what it was made of is not to be added up anew for each use.
__device__ __forceinline__ const char* as_one(const char* address) {
    asm("" : "+l"(address));
    return address;
}

// shim: fast_exp2. 2^x, relative error about 2^-22; 2^-inf is 0.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// shim: fast_reciprocal. 1 / x, one unit in the last place; 1 / inf is 0.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 800
// shim: mma_m16n8k16_f16, mma_m16n8k16_bf16. d += a x b in the fragment layout of the PTX manual: with g = lane / 4 and
// q = lane % 4, a holds (row g, columns 2q 2q+1), (row g+8, same), (row g, columns 2q+8 2q+9), (row g+8, same);
// b holds (rows 2q 2q+1, column g), (rows 2q+8 2q+9, column g); d holds (row g, columns 2q 2q+1), (row g+8, same).
__device__ __forceinline__ void mma_m16n8k16_f16(float d[4], const unsigned a[4], const unsigned b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

__device__ __forceinline__ float half_to_float(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

__device__ __forceinline__ unsigned short float_to_half(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned short float_to_bfloat16(float x) {
    unsigned short h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

__device__ __forceinline__ unsigned pack_half(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned pack_bfloat16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

#if __CUDA_ARCH__ >= 890
#define KV_E4M3_CVT 1
__device__ __forceinline__ void e4m3x4_to_half2x2(unsigned codes, unsigned halves[2]) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(halves[0]), "=r"(halves[1])
        : "r"(codes));
}
#endif

#endif  // KV_EMULATED

// ---------------------------------------------------------------------------------------------------------------------
// Number formats. Storage types are raw bits; these converters are plain C++ and the twins of the instructions above.
// ---------------------------------------------------------------------------------------------------------------------

#ifndef KV_E4M3_CVT
#define KV_E4M3_CVT 0
#endif

// Bytes of a lane's loads under way from an e4m3 cache, and of those with rows of 256 bytes or more: more where
// bandwidth asks for it and registers are left beside the conversion.
#if !KV_E4M3_CVT || (!defined(KV_EMULATED) && __CUDA_ARCH__ < 900)
constexpr int E4M3_LOADS = 128, LONG_E4M3_LOADS = 128;
#elif !defined(KV_EMULATED) && __CUDA_ARCH__ >= 1000
constexpr int E4M3_LOADS = 256, LONG_E4M3_LOADS = 128;
#else
constexpr int E4M3_LOADS = 256, LONG_E4M3_LOADS = 256;
#endif

struct Half {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};
struct E4m3 {
    unsigned char bits;
};

// Round to nearest even; a NaN stays one.
__device__ __forceinline__ unsigned short float_to_bfloat16_plain(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(bits >> 16 | 0x40u);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#ifdef KV_EMULATED
__device__ __forceinline__ const char* as_one(const char* address) { return address; }

__device__ __forceinline__ float half_to_float(unsigned short h) {
    const unsigned sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // As bits of a float the magnitude is 2^112 too small, subnormal numbers included.
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

__device__ __forceinline__ unsigned short float_to_half(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
    unsigned magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // Subnormal: adding 0.5 leaves the code, rounded, in the low bits.
        return (unsigned short)(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u));
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return (unsigned short)(sign | (magnitude - 0x38000000u) >> 13);
}
#endif

#if defined(KV_EMULATED) || __CUDA_ARCH__ < 800
__device__ __forceinline__ unsigned short float_to_bfloat16(float x) {
    return float_to_bfloat16_plain(x);
}

__device__ __forceinline__ unsigned pack_half(float low, float high) {
    return float_to_half(low) | (unsigned)float_to_half(high) << 16;
}

__device__ __forceinline__ unsigned pack_bfloat16(float low, float high) {
    return float_to_bfloat16(low) | (unsigned)float_to_bfloat16(high) << 16;
}
#endif

// e4m3 to fp16, four at a time. With the instruction (sm_89 and newer) the pairs are (0, 1) and (2, 3) and the values
// are exact; by shifting bits (everywhere) the pairs are (0, 2) and (1, 3), values are 256 times too small, since
// fp16's exponent bias is larger by 8, and the NaN code reads as 480.
#if KV_E4M3_CVT
#ifdef KV_EMULATED
__device__ __forceinline__ unsigned short e4m3_to_half(unsigned code) {
    const unsigned sign = (code & 0x80u) << 8, magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return (unsigned short)(sign | 0x7e00u);
    return (unsigned short)(sign | float_to_half(half_to_float((unsigned short)(magnitude << 7)) * 256.0f));
}

__device__ __forceinline__ void e4m3x4_to_half2x2(unsigned codes, unsigned halves[2]) {
    for (int i = 0; i < 2; i++) {
        halves[i] = e4m3_to_half(codes >> 16 * i & 0xffu) | (unsigned)e4m3_to_half(codes >> (16 * i + 8) & 0xffu) << 16;
    }
}
#endif
constexpr float E4M3_UNIT = 1.0f;
#else
constexpr float E4M3_UNIT = 256.0f;

__device__ __forceinline__ void e4m3x4_to_half2x2(unsigned codes, unsigned halves[2]) {
    halves[0] = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3f803f80u);
    halves[1] = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
}
#endif

// To e4m3: round to nearest even, saturate at 448; a NaN becomes the NaN code.
__device__ __forceinline__ unsigned char float_to_e4m3(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    unsigned magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (unsigned char)(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) return (unsigned char)(sign | 0x7eu);
    if (magnitude < 0x3c800000u) {  // Subnormal, below 2^-6: in units of 2^-9, rounded by adding 1.5 x 2^14.
        return (unsigned char)(sign | (__float_as_uint(__uint_as_float(magnitude) + 0x1.8p14f) & 0xfu));
    }
    magnitude += 0x7ffffu + (magnitude >> 20 & 1u);
    return (unsigned char)(sign | ((magnitude >> 20) - 0x3c0u));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(BFloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(E4m3 x) {
    unsigned halves[2];
    e4m3x4_to_half2x2(x.bits, halves);
    return half_to_float((unsigned short)halves[0]) * E4M3_UNIT;
}

__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, Half& y) { y.bits = float_to_half(x); }
__device__ __forceinline__ void from_float(float x, BFloat16& y) { y.bits = float_to_bfloat16(x); }

// ---------------------------------------------------------------------------------------------------------------------
// Arguments. kvplan/kernels/params.py holds the same structs; strides count elements.
// ---------------------------------------------------------------------------------------------------------------------

// A chunk of one request for some of the query heads of one KV head. A chunk that is a whole request has no partial
// (-1) and is written to the output; the others write row `partial + i` for the i-th head.
struct WorkItem {
    int request;
    int first_head;   // query head
    int num_heads;    // at most the variant's head tile, all of one KV head
    int begin;        // tokens begin <= t < end
    int end;
    int partial;
};

// Chunk s of query head h of a request is row `first_partial + s x num_heads + h`.
struct MergeItem {
    int request;
    int first_partial;
    int num_splits;
};

struct PagedAttentionParams {
    const void* query;             // [requests, heads, head_dim]
    const void* key_cache;         // token slot s of block b is row b x cache_rows_per_block + s
    const void* value_cache;       // the same strides
    void* output;                  // [requests, heads, head_dim], contiguous
    float* lse;                    // [requests, heads] or null: natural log of the sum of exp(score)
    float* partial_output;         // [partials, head_dim], each divided by its own sum
    float* partial_lse;            // [partials], base 2
    const int* block_table;        // [requests, block_table_stride]
    const int* context_lens;       // [requests], the new token included
    const WorkItem* work_items;    // one for each block of threads of split and mma
    const MergeItem* merge_items;  // one for each blockIdx.y of merge
    const float* alibi_slopes;     // [heads], with option ALIBI
    const float* key_scale;        // a stored key times its scale is the key; null: 1
    const float* value_scale;
    long long query_stride_request;
    long long query_stride_head;
    long long cache_stride_row;    // below 2^32 bytes
    long long cache_stride_head;
    int cache_rows_per_block;      // block_size, or more where something else lies between blocks
    int block_table_stride;
    int num_heads;
    int num_kv_heads;
    int num_blocks;                // of the cache: a table with other ids is not followed, and the result is NaN
    int block_size_log2;
    int scale_stride;              // 0: one scale for the tensor, 1: one per KV head
    int window;                    // naive only: the last `window` tokens, 0 for all; elsewhere the plan says it
    float scale;
    float soft_cap;                // with option SOFT_CAP
};

struct ReshapeAndCacheParams {
    const void* key;               // [tokens, kv_heads, head_dim]
    const void* value;
    void* key_cache;
    void* value_cache;
    const long long* slot_mapping;  // [tokens]: block x block_size + slot; below 0 skips
    const float* key_scale;        // as above; what is stored is key / scale
    const float* value_scale;
    long long key_stride_token;
    long long value_stride_token;
    long long cache_stride_row;
    long long cache_stride_head;
    long long num_slots;           // of the cache; a slot beyond is skipped
    int cache_rows_per_block;
    int num_kv_heads;
    int block_size_log2;
    int scale_stride;
};

struct CopyBlocksParams {
    const unsigned long long* key_caches;    // [layers] addresses
    const unsigned long long* value_caches;
    const long long* block_pairs;            // [pairs, 2]: source, destination
    long long block_bytes;                   // of one block in one cache, contiguous, a multiple of 16
};

// ---------------------------------------------------------------------------------------------------------------------
// What the attention kernels share.
// ---------------------------------------------------------------------------------------------------------------------

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
// Running maxima start here and masked scores are minus infinity, so that no difference of infinities is taken.
constexpr float NO_SCORE = -1e30f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

// Compile-time options: in a loop that is short of issue slots a branch that is never taken costs too.
template <bool ALIBI_, bool SOFT_CAP_>
struct Options {
    static constexpr bool ALIBI = ALIBI_;
    static constexpr bool SOFT_CAP = SOFT_CAP_;
};

// What turns the product of a query head and a stored key into a score in units of log2.
template <class O>
struct Scoring {
    float scale;  // of the product; with a soft cap its result is twice the score in units of the cap
    float cap;

    __device__ __forceinline__ Scoring(const PagedAttentionParams& p, int kv_head) {
        const float key_scale = p.key_scale == nullptr ? 1.0f : ldg(p.key_scale + (long long)kv_head * p.scale_stride);
        scale = p.scale * key_scale * (O::SOFT_CAP ? 2.0f / p.soft_cap : 1.0f) * LOG2_E;
        cap = O::SOFT_CAP ? p.soft_cap * LOG2_E : 0.0f;
    }

    static __device__ __forceinline__ float slope(const PagedAttentionParams& p, int head) {
        return O::ALIBI ? ldg(p.alibi_slopes + head) * LOG2_E : 0.0f;
    }

    // The score over a reference. `distance` is token + 1 - context: 0 for the newest token, which ALiBi leaves alone.
    __device__ __forceinline__ float operator()(float product, int distance, float slope, float reference) const {
        const float shift = O::ALIBI ? slope * (float)distance - reference : -reference;
        // tanh(x) = 1 - 2 / (1 + e^2x): off by 2^-21 of the cap at most, and no branch.
        if (O::SOFT_CAP) return fmaf(-2.0f * cap, fast_reciprocal(1.0f + fast_exp2(product * scale)), cap + shift);
        return fmaf(product, scale, shift);
    }
};

__device__ __forceinline__ float value_scale_of(const PagedAttentionParams& p, int kv_head) {
    return p.value_scale == nullptr ? 1.0f : ldg(p.value_scale + (long long)kv_head * p.scale_stride);
}

// Whether the ids that lead to tokens begin <= t < end are blocks of the cache. A warp asks for itself and agrees.
// Where one is not, nothing is read and the result is NaN: a stale table shows.
__device__ __forceinline__ bool blocks_exist(const PagedAttentionParams& p, int request, int begin, int end) {
    const int* table = p.block_table + (long long)request * p.block_table_stride;
    bool exist = true;
    if (begin < end) {
        const int last = (end - 1) >> p.block_size_log2;
        for (int i = (begin >> p.block_size_log2) + (int)(threadIdx.x % 32); i <= last; i += 32) {
            exist = exist && (unsigned)ldg(table + i) < (unsigned)p.num_blocks;
        }
    }
    return !__any_sync(ALL_LANES, !exist);
}

// The number of the row where a token's key and value lie; the host sees to it that it is below 2^32.
__device__ __forceinline__ unsigned row_in_block(const PagedAttentionParams& p, int block_id, int token) {
    return (unsigned)block_id * (unsigned)p.cache_rows_per_block + (unsigned)(token & ((1 << p.block_size_log2) - 1));
}

// In elements from the start of the cache, for KV head 0.
__device__ __forceinline__ long long row_of(const PagedAttentionParams& p, int request, int token) {
    const int* table = p.block_table + (long long)request * p.block_table_stride;
    return row_in_block(p, ldg(table + (token >> p.block_size_log2)), token) * p.cache_stride_row;
}

__device__ __forceinline__ float natural_lse(float maximum, float sum) {
    return sum > 0.0f ? maximum * LN_2 + logf(sum) : (sum == 0.0f ? minus_infinity() : sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// naive: a block of threads for each (query head, request) = (blockIdx.x, blockIdx.y).
//
// Each thread walks its own keys element by element, so that a warp touches 32 rows for 32 elements; each KV head is
// read once for every query head; batch x heads blocks are all there is to run. It is here to be compared with. Shared
// memory: THREADS floats, then one for each token.
// ---------------------------------------------------------------------------------------------------------------------

template <bool MAXIMUM>
__device__ __forceinline__ float reduce_block(float value, float* scratch) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const float other = scratch[threadIdx.x + half];
            scratch[threadIdx.x] = MAXIMUM ? fmaxf(scratch[threadIdx.x], other) : scratch[threadIdx.x] + other;
        }
        __syncthreads();
    }
    const float result = scratch[0];
    __syncthreads();
    return result;
}

template <class T, class KV, int HEAD_DIM, class O>
__device__ __forceinline__ void naive_attention(const PagedAttentionParams& p) {
    KV_SHARED(float, scratch);
    float* scores = scratch + THREADS;
    const int head = blockIdx.x, request = blockIdx.y;
    const int kv_head = head / (p.num_heads / p.num_kv_heads);
    const int context = ldg(p.context_lens + request);
    const int begin = p.window > 0 && context > p.window ? context - p.window : 0;
    const T* query = (const T*)p.query + request * p.query_stride_request + head * p.query_stride_head;
    const KV* keys = (const KV*)p.key_cache + kv_head * p.cache_stride_head;
    const KV* values = (const KV*)p.value_cache + kv_head * p.cache_stride_head;
    const Scoring<O> scoring(p, kv_head);
    const float slope = scoring.slope(p, head);

    const bool exist = blocks_exist(p, request, begin, context);
    const int end = exist ? context : begin;
    float maximum = NO_SCORE;
    for (int t = begin + threadIdx.x; t < end; t += THREADS) {
        const KV* key = keys + row_of(p, request, t);
        float product = 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) product += to_float(ldg(query + d)) * to_float(ldg(key + d));
        const float score = scoring(product, t + 1 - context, slope, 0.0f);
        scores[t - begin] = score;
        maximum = fmaxf(maximum, score);
    }
    maximum = reduce_block<true>(maximum, scratch);

    float sum = exist ? 0.0f : not_a_number();
    for (int t = begin + threadIdx.x; t < end; t += THREADS) {
        const float weight = fast_exp2(scores[t - begin] - maximum);
        scores[t - begin] = weight;
        sum += weight;
    }
    sum = reduce_block<false>(sum, scratch);

    const long long row = (long long)request * p.num_heads + head;
    const float factor = sum == 0.0f ? 0.0f : value_scale_of(p, kv_head) / sum;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        float output = 0.0f;
        for (int t = begin; t < end; t++) {
            output += scores[t - begin] * to_float(ldg(values + row_of(p, request, t) + d));
        }
        T stored;
        from_float(output * factor, stored);
        stg((T*)p.output + row * HEAD_DIM + d, stored);
    }
    if (p.lse != nullptr && threadIdx.x == 0) stg(p.lse + row, natural_lse(maximum, sum));
}

// ---------------------------------------------------------------------------------------------------------------------
// What split and mma share: work items, row decoding, and putting the warps of a block together.
// ---------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ WorkItem work_item_of(const PagedAttentionParams& p) {
    const WorkItem* item = p.work_items + blockIdx.x;
    return {ldg(&item->request), ldg(&item->first_head), ldg(&item->num_heads),
            ldg(&item->begin),   ldg(&item->end),        ldg(&item->partial)};
}

__device__ __forceinline__ int kv_head_of(const PagedAttentionParams& p, const WorkItem& item) {
    return item.first_head / (p.num_heads / p.num_kv_heads);
}

// What a decoded element is multiplied by to be the stored value.
template <class KV>
__device__ constexpr float unit_of() {
    return sizeof(KV) == 1 ? E4M3_UNIT : 1.0f;
}

__device__ __forceinline__ void decode_word(float, unsigned word, float* out) { out[0] = __uint_as_float(word); }
__device__ __forceinline__ void decode_word(BFloat16, unsigned word, float* out) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void decode_word(Half, unsigned word, float* out) {
    out[0] = half_to_float((unsigned short)word);
    out[1] = half_to_float((unsigned short)(word >> 16));
}
__device__ __forceinline__ void decode_word(E4m3, unsigned word, float* out) {
    constexpr int SECOND = KV_E4M3_CVT ? 1 : 2;  // the element beside the first in halves[0]
    unsigned halves[2];
    e4m3x4_to_half2x2(word, halves);
    decode_word(Half{}, halves[0], out);
    const float beside = out[1];
    decode_word(Half{}, halves[1], out + 2);
    if (SECOND == 2) {
        out[1] = out[2];
        out[2] = beside;
    }
}

template <class KV>
__device__ __forceinline__ void decode(uint4 vector, float* out) {
    constexpr int PER_WORD = 4 / sizeof(KV);
    decode_word(KV{}, vector.x, out);
    decode_word(KV{}, vector.y, out + PER_WORD);
    decode_word(KV{}, vector.z, out + 2 * PER_WORD);
    decode_word(KV{}, vector.w, out + 3 * PER_WORD);
}

// Results of PARTS parts of a block's warps for HEADS heads, in shared memory: weighted values, maximum (base 2), sum.
template <int HEAD_DIM, int HEADS, int PARTS>
struct BlockResults {
    float values[PARTS][HEADS][HEAD_DIM];
    float maximum[PARTS][HEADS];
    float sum[PARTS][HEADS];
};

// Puts the parts together and writes the item's heads: to the output, or as partial results for merge_partials.
template <class T, class KV, int HEAD_DIM, int HEADS, int PARTS>
__device__ __forceinline__ void write_results(
    const PagedAttentionParams& p, const BlockResults<HEAD_DIM, HEADS, PARTS>& results
) {
    __syncthreads();
    const WorkItem item = work_item_of(p);  // read again, which costs less than registers through the loop
    const float value_scale = value_scale_of(p, kv_head_of(p, item)) * unit_of<KV>();
    for (int i = threadIdx.x; i < item.num_heads * HEAD_DIM; i += THREADS) {
        const int h = i / HEAD_DIM, d = i % HEAD_DIM;
        float maximum = NO_SCORE;
        for (int part = 0; part < PARTS; part++) maximum = fmaxf(maximum, results.maximum[part][h]);
        float output = 0.0f, sum = 0.0f;
        for (int part = 0; part < PARTS; part++) {
            const float weight = fast_exp2(results.maximum[part][h] - maximum);
            output += weight * results.values[part][h][d];
            sum += weight * results.sum[part][h];
        }
        output = sum == 0.0f ? 0.0f : output * (value_scale / sum);
        if (item.partial < 0) {
            const long long row = (long long)item.request * p.num_heads + item.first_head + h;
            T stored;
            from_float(output, stored);
            stg((T*)p.output + row * HEAD_DIM + d, stored);
            if (p.lse != nullptr && d == 0) stg(p.lse + row, natural_lse(maximum, sum));
        } else {
            const long long row = (long long)item.partial + h;
            stg(p.partial_output + row * HEAD_DIM + d, output);
            if (d == 0) stg(p.partial_lse + row, natural_lse(maximum, sum) * LOG2_E);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// split: CUDA cores, a block of threads for each work item.
//
// LANES lanes hold one key, 16 bytes each (twice where a row is longer than 512 bytes); a warp takes KEYS x UNROLL
// tokens at once and has all their loads in flight. Each group of lanes keeps its own running maximum, sum and output.
// Shared memory: BlockResults<HEAD_DIM, HEADS, WARPS>.
// ---------------------------------------------------------------------------------------------------------------------

__device__ constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

template <class T, class KV, int HEAD_DIM, int HEADS, class O>
struct Split {
    static constexpr int ELEMENTS = 16 / sizeof(KV);
    static constexpr int ROW_VECTORS = HEAD_DIM / ELEMENTS;
    static constexpr int LANES = ROW_VECTORS > 32 ? 32 : next_power_of_two(ROW_VECTORS);
    static constexpr int VECTORS = (ROW_VECTORS + LANES - 1) / LANES;
    static constexpr int KEYS = 32 / LANES;
    static constexpr int UNROLL = 4 / VECTORS;
    static constexpr int WIDTH = VECTORS * ELEMENTS;  // elements of a row that a lane holds
    static_assert(HEAD_DIM % ELEMENTS == 0, "rows are whole vectors");

    float query[HEADS][WIDTH];
    float output[HEADS][WIDTH];
    float maximum[HEADS];
    float sum[HEADS];
    float slope[HEADS];
    Scoring<O> scoring;

    // The dimension at which a lane's v-th vector starts; HEAD_DIM or more for one that it does not have.
    static __device__ __forceinline__ int dimension(int v) {
        return (v * LANES + (int)(threadIdx.x % LANES)) * ELEMENTS;
    }

    __device__ __forceinline__ Split(const PagedAttentionParams& p, const WorkItem& item, int kv_head)
        : scoring(p, kv_head) {
        scoring.scale *= unit_of<KV>();
        KV_UNROLL for (int h = 0; h < HEADS; h++) {
            const bool there = h < item.num_heads;
            const T* row = (const T*)p.query + item.request * p.query_stride_request +
                           (item.first_head + h) * p.query_stride_head;
            KV_UNROLL for (int v = 0; v < VECTORS; v++) {
                KV_UNROLL for (int i = 0; i < (int)(ELEMENTS * sizeof(T)) / 16; i++) {
                    uint4 part = make_uint4(0u, 0u, 0u, 0u);
                    if (there && dimension(v) < HEAD_DIM) part = ldg128((const uint4*)(row + dimension(v)) + i);
                    decode<T>(part, query[h] + v * ELEMENTS + i * 16 / sizeof(T));
                }
            }
            KV_UNROLL for (int e = 0; e < WIDTH; e++) output[h][e] = 0.0f;
            maximum[h] = NO_SCORE;
            sum[h] = 0.0f;
            slope[h] = there ? scoring.slope(p, item.first_head + h) : 0.0f;
        }
    }

    // One key and value for each of UNROLL tokens; a token that is not `valid` weighs nothing.
    __device__ __forceinline__ void attend(
        const uint4 keys[UNROLL][VECTORS], const uint4 values[UNROLL][VECTORS], const bool valid[UNROLL],
        const int distance[UNROLL]
    ) {
        float scores[UNROLL][HEADS];
        KV_UNROLL for (int u = 0; u < UNROLL; u++) {
            float key[WIDTH];
            KV_UNROLL for (int v = 0; v < VECTORS; v++) decode<KV>(keys[u][v], key + v * ELEMENTS);
            KV_UNROLL for (int h = 0; h < HEADS; h++) {
                float product = 0.0f;
                KV_UNROLL for (int e = 0; e < WIDTH; e++) product = fmaf(query[h][e], key[e], product);
                KV_UNROLL for (int step = LANES / 2; step > 0; step /= 2) {
                    product += __shfl_xor_sync(ALL_LANES, product, step);
                }
                scores[u][h] = valid[u] ? scoring(product, distance[u], slope[h], 0.0f) : minus_infinity();
            }
        }
        KV_UNROLL for (int h = 0; h < HEADS; h++) {
            float highest = maximum[h];
            KV_UNROLL for (int u = 0; u < UNROLL; u++) highest = fmaxf(highest, scores[u][h]);
            const float shrink = fast_exp2(maximum[h] - highest);
            maximum[h] = highest;
            sum[h] *= shrink;
            KV_UNROLL for (int e = 0; e < WIDTH; e++) output[h][e] *= shrink;
            KV_UNROLL for (int u = 0; u < UNROLL; u++) {
                scores[u][h] = fast_exp2(scores[u][h] - highest);
                sum[h] += scores[u][h];
            }
        }
        KV_UNROLL for (int u = 0; u < UNROLL; u++) {
            float value[WIDTH];
            KV_UNROLL for (int v = 0; v < VECTORS; v++) decode<KV>(values[u][v], value + v * ELEMENTS);
            KV_UNROLL for (int h = 0; h < HEADS; h++) {
                KV_UNROLL for (int e = 0; e < WIDTH; e++) output[h][e] = fmaf(scores[u][h], value[e], output[h][e]);
            }
        }
    }

    // Puts the warp's groups of lanes together and leaves the result in shared memory.
    __device__ __forceinline__ void finish(bool exist, BlockResults<HEAD_DIM, HEADS, WARPS>& results) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        KV_UNROLL for (int h = 0; h < HEADS; h++) {
            float highest = maximum[h];
            KV_UNROLL for (int step = LANES; step < 32; step *= 2) {
                highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
            }
            const float shrink = fast_exp2(maximum[h] - highest);
            float total = exist ? sum[h] * shrink : not_a_number();
            KV_UNROLL for (int step = LANES; step < 32; step *= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
            KV_UNROLL for (int e = 0; e < WIDTH; e++) {
                float out = output[h][e] * shrink;
                KV_UNROLL for (int step = LANES; step < 32; step *= 2) out += __shfl_xor_sync(ALL_LANES, out, step);
                const int d = dimension(e / ELEMENTS) + e % ELEMENTS;
                if (lane < LANES && d < HEAD_DIM) results.values[warp][h][d] = out;
            }
            if (lane == 0) {
                results.maximum[warp][h] = highest;
                results.sum[warp][h] = total;
            }
        }
    }
};

template <class T, class KV, int HEAD_DIM, int HEADS, class O>
__device__ __forceinline__ void split_attention(const PagedAttentionParams& p) {
    using Warp = Split<T, KV, HEAD_DIM, HEADS, O>;
    using Results = BlockResults<HEAD_DIM, HEADS, WARPS>;
    KV_SHARED(Results, results);
    const WorkItem item = work_item_of(p);
    const int kv_head = kv_head_of(p, item);
    const int context = O::ALIBI ? ldg(p.context_lens + item.request) : 0;
    const KV* keys = (const KV*)p.key_cache + kv_head * p.cache_stride_head;
    const KV* values = (const KV*)p.value_cache + kv_head * p.cache_stride_head;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int TOKENS = Warp::KEYS * Warp::UNROLL;

    Warp state(p, item, kv_head);
    const bool exist = blocks_exist(p, item.request, item.begin, item.end);
    const int end = exist ? item.end : item.begin;
    for (int base = item.begin + warp * TOKENS; base < end; base += WARPS * TOKENS) {
        uint4 key[Warp::UNROLL][Warp::VECTORS], value[Warp::UNROLL][Warp::VECTORS];
        bool valid[Warp::UNROLL];
        int distance[Warp::UNROLL];
        KV_UNROLL for (int u = 0; u < Warp::UNROLL; u++) {
            const int token = base + u * Warp::KEYS + lane / Warp::LANES;
            valid[u] = token < end;
            distance[u] = token + 1 - context;
            // Past the end the last token is read again: what lies there may be anything, NaN included.
            const long long row = row_of(p, item.request, valid[u] ? token : end - 1);
            KV_UNROLL for (int v = 0; v < Warp::VECTORS; v++) {
                const int d = Warp::dimension(v);
                key[u][v] = d < HEAD_DIM ? ldg128(keys + row + d) : make_uint4(0u, 0u, 0u, 0u);
                value[u][v] = d < HEAD_DIM ? ldg128(values + row + d) : make_uint4(0u, 0u, 0u, 0u);
            }
        }
        state.attend(key, value, valid, distance);
    }
    state.finish(exist, *results);
    write_results<T, KV>(p, *results);
}

// ---------------------------------------------------------------------------------------------------------------------
// mma: tensor cores, a block of threads for each work item; fp16, bf16 and e4m3 caches, sm_80 and newer.
//
// Sums over head_dim and over keys may be taken in any order, so the order is chosen in which the contiguous bytes that
// a lane loads are its fragment: lanes exchange no keys or values. With g = lane / 4 and q = lane % 4:
//   scores = Q x K   16 heads are the rows, 8 tokens the columns. A lane loads 16 bytes of the key of token g of the 8,
//                    at byte 64c + 16q; their words are the fragments of the steps, and the query is loaded in the
//                    same order. Where there are only 8 heads, rows 8 to 15 are the same heads at the next step's
//                    dimensions, and of the products with a step's words one half of the rows is of use.
//   output = V x P   16 dimensions are the rows, 8 heads the columns. A lane loads 16 bytes of values 2q, 2q+1, 2q+8
//                    and 2q+9 of 16 tokens at byte 128i + 16g and pairs the tokens by byte permutes: rows g and g + 8
//                    of tile j are elements 2j and 2j+1 of those 16 bytes.
// The scores of 2 tokens that a lane gets, of head g and tokens 2q and 2q+1, are its fragment of P as they stand.
//
// K and V take turns in one set of registers, `ring`: where a piece of K has been used, the same piece of V of the same
// tokens is asked for, and where that has been used, K of the warp's next tokens. So loads are always under way.
//
// Two warps share 16 heads of more than 128 dimensions, half of the dimensions each, and add up their scores through
// shared memory once a turn; the rest of a turn they do without each other. Where half a row is 96 bytes, lanes load 8
// bytes of keys and 4 of values at once.
//
// Exponents refer to a value that starts at the first maximum and follows it only once a score is larger by more than
// LAZY_LOG2, which no format minds; outputs are then scaled in a branch that is rarely taken.
// Shared memory: BlockResults<HEAD_DIM, HEADS, Mma<...>::KEY_WARPS>, in the loop for the scores of warps that share.
// ---------------------------------------------------------------------------------------------------------------------

#if defined(KV_EMULATED) || __CUDA_ARCH__ >= 800

constexpr float LAZY_LOG2 = 8.0f;
constexpr float LARGEST_HALF = 65504.0f;

template <class T>
struct IsBFloat16 {
    static constexpr bool VALUE = false;
};
template <>
struct IsBFloat16<BFloat16> {
    static constexpr bool VALUE = true;
};

// Where a warp's tokens lie: lane l holds tokens l and l + 32 of those it takes at once. Ids of blocks are asked for
// one turn before they are needed. Past the end the last token stands in: what lies there may be anything, NaN
// included.
template <class KV, int LOOKUPS>
struct TokenRows {
    const int* table;
    int last_token;
    unsigned row_bytes;
    int block_ids[LOOKUPS];
    unsigned rows[LOOKUPS];

    __device__ __forceinline__ TokenRows(const PagedAttentionParams& p, const WorkItem& item)
        : table(p.block_table + (long long)item.request * p.block_table_stride),
          last_token(item.end - 1),
          row_bytes((unsigned)(p.cache_stride_row * sizeof(KV))) {}

    __device__ __forceinline__ int token(int base, int i) const {
        const int t = base + 32 * i + (int)(threadIdx.x % 32);
        return t < last_token ? t : last_token;
    }

    __device__ __forceinline__ void ask(const PagedAttentionParams& p, int base) {
        KV_UNROLL for (int i = 0; i < LOOKUPS; i++) block_ids[i] = ldg(table + (token(base, i) >> p.block_size_log2));
    }

    __device__ __forceinline__ void resolve(const PagedAttentionParams& p, int base) {
        KV_UNROLL for (int i = 0; i < LOOKUPS; i++) {
            rows[i] = row_in_block(p, block_ids[i], token(base, i));
        }
    }

    // Where the warp's j-th token lies in a cache.
    __device__ __forceinline__ const char* of(const char* cache, int j) const {
        return cache + (unsigned long long)__shfl_sync(ALL_LANES, rows[j / 32], j % 32) * row_bytes;
    }
};

template <class T, class KV, int HEAD_DIM, int HEADS, class O>
struct Mma {
    static constexpr bool FP8 = sizeof(KV) == 1;
    static constexpr bool BF16 = IsBFloat16<KV>::VALUE;
    // Warps that share the tokens of 16 heads' long rows, each with its part of the dimensions, so that queries and
    // outputs fit in registers and every byte is loaded and converted once.
    static constexpr int SHARERS = HEADS == 16 && HEAD_DIM > 128 ? 2 : 1;
    static constexpr int KEY_WARPS = WARPS / SHARERS;
    static constexpr int DIMS = HEAD_DIM / SHARERS;
    static constexpr int ROW_BYTES = DIMS * sizeof(KV);
    static constexpr int TILES = HEADS / 8;
    // A warp takes GROUPS x 16 tokens at once, as many as its registers hold.
    static constexpr int LONG_LOADS = O::ALIBI || O::SOFT_CAP ? 128 : LONG_E4M3_LOADS;  // they take registers
    static constexpr int LOADS = !FP8 ? 256 : ROW_BYTES < 256 ? E4M3_LOADS : LONG_LOADS;  // bytes of a lane
    static constexpr int FITTING = 2 * LOADS / ROW_BYTES, MOST = FP8 && ROW_BYTES > 64 ? 3 : 4;
    static constexpr int GROUPS = FITTING < 1 ? 1 : FITTING > MOST ? MOST : FITTING;
    static constexpr int TOKENS = 16 * GROUPS;
    static constexpr int LOOKUPS = (TOKENS + 31) / 32;
    // A row in pieces: of a piece a lane loads VALUE_BYTES of each of 4 values, or KEY_BYTES of CHUNKS x 2 keys.
    static constexpr int PIECE_BYTES = ROW_BYTES % 128 == 0 ? 128 : ROW_BYTES % 64 == 0 ? 64 : 32;
    static constexpr int PIECES = ROW_BYTES / PIECE_BYTES;
    static constexpr int KEY_BYTES = PIECE_BYTES < 64 ? 8 : 16;
    static constexpr int CHUNKS = PIECE_BYTES / (4 * KEY_BYTES);
    static constexpr int VALUE_BYTES = PIECE_BYTES / 8;
    static constexpr int WORDS = PIECE_BYTES / 8;
    static constexpr int STEPS = KEY_BYTES / (FP8 ? 4 : 8);           // of 16 dimensions in KEY_BYTES x 4 lanes
    static constexpr int VALUE_ELEMENTS = VALUE_BYTES / sizeof(KV);
    static constexpr int VALUE_TILES = VALUE_ELEMENTS / 2;            // of 16 dimensions in a piece
    static_assert(ROW_BYTES % PIECE_BYTES == 0 && (HEADS == 8 || HEADS == 16), "whole pieces, whole tiles");
    static_assert(FP8 ? sizeof(T) == 2 : IsBFloat16<T>::VALUE == BF16 && sizeof(T) == 2, "16-bit queries");

    // Of rows g and g + 8: two tiles of heads, or one tile at two steps.
    unsigned query[PIECES * CHUNKS][STEPS * TILES / 2][4];
    unsigned ring[GROUPS][PIECES][WORDS];
    float scores[GROUPS][2][TILES][2];        // of 8 tokens: head g of each tile, tokens 2q, 2q+1; in log2
    unsigned weights[GROUPS][TILES][2];
    float output[PIECES][VALUE_TILES][TILES][4];  // (elements 2j, heads 2q, 2q+1), (2j+1, same)
    float reference[TILES];      // of head g of each tile
    float sum[TILES];            // over this lane's tokens
    float slope[TILES];
    Scoring<O> scoring;

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int g() { return lane() / 4; }
    static __device__ __forceinline__ int q() { return lane() % 4; }
    static __device__ __forceinline__ int key_warp() { return threadIdx.x / 32 % KEY_WARPS; }
    static __device__ __forceinline__ int sharer() { return SHARERS == 1 ? 0 : threadIdx.x / 32 / KEY_WARPS; }

    static __device__ __forceinline__ void mma(float d[4], const unsigned a[4], const unsigned b[2]) {
        if constexpr (BF16) {
            mma_m16n8k16_bf16(d, a, b);
        } else {
            mma_m16n8k16_f16(d, a, b);
        }
    }

    static __device__ __forceinline__ void clear(float d[4]) { d[0] = d[1] = d[2] = d[3] = 0.0f; }

    static __device__ __forceinline__ unsigned pack(float low, float high) {
        return BF16 ? pack_bfloat16(low, high) : pack_half(low, high);
    }

    __device__ __forceinline__ void load_query(const PagedAttentionParams& p, const WorkItem& item, int tile) {
        const int h = 8 * tile + g();
        const T* row = (const T*)p.query + item.request * p.query_stride_request +
                       (item.first_head + h) * p.query_stride_head + sharer() * DIMS;
        KV_UNROLL for (int c = 0; c < PIECES * CHUNKS; c++) {
            KV_UNROLL for (int i = 0; i < STEPS / 2; i++) {
                uint4 part = make_uint4(0u, 0u, 0u, 0u);
                if (h < item.num_heads) part = ldg128(row + (4 * c + q()) * 4 * STEPS + 8 * i);
                unsigned pairs[4] = {part.x, part.y, part.z, part.w};
                if constexpr (FP8) {  // As fp16, and paired as the cache's elements are.
                    constexpr int BESIDE = KV_E4M3_CVT ? 1 : 2, OTHER = 3 - BESIDE;
                    float x[8];
                    decode<T>(part, x);
                    KV_UNROLL for (int e = 0; e < 8; e++) x[e] = fminf(fmaxf(x[e], -LARGEST_HALF), LARGEST_HALF);
                    KV_UNROLL for (int word = 0; word < 2; word++) {
                        pairs[2 * word] = pack_half(x[4 * word], x[4 * word + BESIDE]);
                        pairs[2 * word + 1] = pack_half(x[4 * word + OTHER], x[4 * word + 3]);
                    }
                }
                KV_UNROLL for (int half = 0; half < 2; half++) {
                    const int step = 2 * i + half, row = TILES == 1 ? half : tile;
                    query[c][step * TILES / 2][row] = pairs[2 * half];
                    query[c][step * TILES / 2][row + 2] = pairs[2 * half + 1];
                }
            }
        }
    }

    __device__ __forceinline__ Mma(const PagedAttentionParams& p, const WorkItem& item, int kv_head)
        : scoring(p, kv_head) {
        scoring.scale *= unit_of<KV>();
        KV_UNROLL for (int tile = 0; tile < TILES; tile++) {
            const int h = 8 * tile + g();
            load_query(p, item, tile);
            reference[tile] = 0.0f;
            sum[tile] = 0.0f;
            slope[tile] = h < item.num_heads ? scoring.slope(p, item.first_head + h) : 0.0f;
            KV_UNROLL for (int piece = 0; piece < PIECES; piece++) {
                KV_UNROLL for (int j = 0; j < VALUE_TILES; j++) clear(output[piece][j][tile]);
            }
        }
    }

    template <int BYTES>
    static __device__ __forceinline__ void load(unsigned* words, const char* address) {
        if constexpr (BYTES == 16) {
            const uint4 v = ldg128(address);
            words[0] = v.x;
            words[1] = v.y;
            words[2] = v.z;
            words[3] = v.w;
        } else if constexpr (BYTES == 8) {
            const uint2 v = ldg((const uint2*)address);
            words[0] = v.x;
            words[1] = v.y;
        } else {
            words[0] = ldg((const unsigned*)address);
        }
    }

    // KEY_BYTES of keys g and g + 8 of a group, for each chunk of a piece.
    __device__ __forceinline__ void load_keys(const char* const keys[2], int group, int piece) {
        KV_UNROLL for (int c = 0; c < CHUNKS; c++) {
            KV_UNROLL for (int i = 0; i < 2; i++) {
                load<KEY_BYTES>(ring[group][piece] + (2 * c + i) * (KEY_BYTES / 4),
                                keys[i] + piece * PIECE_BYTES + c * 4 * KEY_BYTES);
            }
        }
    }

    // VALUE_BYTES of values 2q, 2q+1, 2q+8, 2q+9 of a group.
    __device__ __forceinline__ void load_values(const char* const values[4], int group, int piece) {
        KV_UNROLL for (int i = 0; i < 4; i++) {
            load<VALUE_BYTES>(ring[group][piece] + i * (VALUE_BYTES / 4), values[i] + piece * PIECE_BYTES);
        }
    }

    // Of 8 tokens: (row g, tokens 2q, 2q+1), (row g+8, same).
    using Products = float[2][2 / TILES][4];

    // Products of a piece of the keys of a group with the queries, added up.
    __device__ __forceinline__ void multiply_keys(Products& products, int group, int piece) {
        KV_UNROLL for (int c = 0; c < CHUNKS; c++) {
            KV_UNROLL for (int step = 0; step < STEPS; step++) {
                KV_UNROLL for (int i = 0; i < 2; i++) {
                    const unsigned* words = ring[group][piece] + (2 * c + i) * (KEY_BYTES / 4);
                    unsigned b[2];
                    if constexpr (FP8) {
                        e4m3x4_to_half2x2(words[step], b);
                    } else {
                        b[0] = words[2 * step];
                        b[1] = words[2 * step + 1];
                    }
                    mma(products[i][TILES == 1 ? step % 2 : 0], query[piece * CHUNKS + c][step * TILES / 2], b);
                }
            }
        }
    }

    // Products of a piece of the values of a group with the weights, added to the output.
    __device__ __forceinline__ void multiply_values(int group, int piece) {
        constexpr int PER_VALUE = VALUE_BYTES / 4;
        const unsigned* words = ring[group][piece];
        KV_UNROLL for (int w = 0; w < PER_VALUE; w++) {
            const unsigned v0 = words[w], v1 = words[PER_VALUE + w];
            const unsigned v8 = words[2 * PER_VALUE + w], v9 = words[3 * PER_VALUE + w];
            if constexpr (FP8) {
                // Two elements of two tokens, in the order that makes one pair of tokens of each element.
                constexpr unsigned FIRST = KV_E4M3_CVT ? 0x5140u : 0x5410u, SECOND = KV_E4M3_CVT ? 0x7362u : 0x7632u;
                KV_UNROLL for (int i = 0; i < 2; i++) {
                    unsigned near[2], far[2];
                    e4m3x4_to_half2x2(__byte_perm(v0, v1, i == 0 ? FIRST : SECOND), near);
                    e4m3x4_to_half2x2(__byte_perm(v8, v9, i == 0 ? FIRST : SECOND), far);
                    const unsigned a[4] = {near[0], near[1], far[0], far[1]};
                    KV_UNROLL for (int tile = 0; tile < TILES; tile++) {
                        mma(output[piece][2 * w + i][tile], a, weights[group][tile]);
                    }
                }
            } else {
                const unsigned a[4] = {
                    __byte_perm(v0, v1, 0x5410u), __byte_perm(v0, v1, 0x7632u),
                    __byte_perm(v8, v9, 0x5410u), __byte_perm(v8, v9, 0x7632u)
                };
                KV_UNROLL for (int tile = 0; tile < TILES; tile++) mma(output[piece][w][tile], a, weights[group][tile]);
            }
        }
    }

    using Rows = TokenRows<KV, LOOKUPS>;

    __device__ __forceinline__ void load_keys(const char* keys, const Rows& rows, int group) {
        const char* const at[2] = {rows.of(keys, 16 * group + g()), rows.of(keys, 16 * group + g() + 8)};
        KV_UNROLL for (int piece = 0; piece < PIECES; piece++) load_keys(at, group, piece);
    }

    // Scores of a group; its values take the place of its keys.
    __device__ __forceinline__ void use_keys(const char* values, const Rows& rows, int group) {
        const int first = 16 * group + 2 * q();
        const char* const at[4] = {rows.of(values, first), rows.of(values, first + 1), rows.of(values, first + 8),
                                   rows.of(values, first + 9)};
        Products products;
        KV_UNROLL for (int i = 0; i < 2; i++) {
            KV_UNROLL for (int set = 0; set < 2 / TILES; set++) clear(products[i][set]);
        }
        KV_UNROLL for (int piece = 0; piece < PIECES; piece++) {
            multiply_keys(products, group, piece);
            load_values(at, group, piece);
        }
        KV_UNROLL for (int i = 0; i < 2; i++) {
            KV_UNROLL for (int next = 0; next < 2; next++) {
                scores[group][i][0][next] = products[i][0][next];
                if constexpr (TILES == 1) {
                    scores[group][i][0][next] += products[i][1][2 + next];
                } else {
                    scores[group][i][1][next] = products[i][0][2 + next];
                }
            }
        }
    }

    // Output of a group; if there are more tokens, their keys take the place of its values.
    __device__ __forceinline__ void use_values(const char* keys, const Rows& rows, int group, bool more) {
        const char* const at[2] = {rows.of(keys, 16 * group + g()), rows.of(keys, 16 * group + g() + 8)};
        KV_UNROLL for (int piece = 0; piece < PIECES; piece++) {
            multiply_values(group, piece);
            if (more) load_keys(at, group, piece);
        }
    }

    using Results = BlockResults<HEAD_DIM, HEADS, KEY_WARPS>;
    // Of a turn, each in its part of the results' memory: where a warp leaves its scores for the other.
    using Exchange = float4[SHARERS][GROUPS * TILES][32];
    static_assert(SHARERS == 1 || 2 * sizeof(Exchange) <= sizeof(float[HEADS][HEAD_DIM]), "two turns' scores fit");

    static __device__ __forceinline__ void sync_sharers() {
        if constexpr (SHARERS > 1) sync_warps(1 + key_warp(), 32 * SHARERS);
    }

    // Adds the other warp's scores, over its dimensions, to these. Turns alternate between two places, so that one
    // barrier is enough. Both warps get the same bits, so that they take the same branches.
    __device__ __forceinline__ void share_scores(Results& results, int place) {
        if constexpr (SHARERS > 1) {
            Exchange& exchange = reinterpret_cast<Exchange*>(results.values[key_warp()])[place];
            KV_UNROLL for (int i = 0; i < GROUPS * TILES; i++) {
                const float(*s)[2] = scores[i / 2][i % 2];
                exchange[sharer()][i][lane()] = make_float4(s[0][0], s[0][1], s[1][0], s[1][1]);
            }
            sync_sharers();
            KV_UNROLL for (int i = 0; i < GROUPS * TILES; i++) {
                float(*s)[2] = scores[i / 2][i % 2];
                const float4 other = exchange[1 - sharer()][i][lane()];
                s[0][0] += other.x;
                s[0][1] += other.y;
                s[1][0] += other.z;
                s[1][1] += other.w;
            }
        }
    }

    // Moves the reference of each head's exponents to its maximum over the warp's tokens, if that is higher or the
    // first.
    __device__ __forceinline__ void follow_maximum(bool first) {
        KV_UNROLL for (int tile = 0; tile < TILES; tile++) {
            float rise = first ? NO_SCORE : 0.0f;
            KV_UNROLL for (int group = 0; group < GROUPS; group++) {
                KV_UNROLL for (int i = 0; i < 2; i++) {
                    rise = fmaxf(rise, fmaxf(scores[group][i][tile][0], scores[group][i][tile][1]));
                }
            }
            rise = fmaxf(rise, __shfl_xor_sync(ALL_LANES, rise, 1));
            rise = fmaxf(rise, __shfl_xor_sync(ALL_LANES, rise, 2));
            reference[tile] += rise;
            KV_UNROLL for (int group = 0; group < GROUPS; group++) {
                KV_UNROLL for (int i = 0; i < 4; i++) scores[group][i / 2][tile][i % 2] -= rise;
            }
            if (first) continue;
            const float shrink = fast_exp2(-rise);
            sum[tile] *= shrink;
            // The outputs here are of heads 2q and 2q + 1, whose lanes have other q.
            KV_UNROLL for (int i = 0; i < 2; i++) {
                const float factor = __shfl_sync(ALL_LANES, shrink, 4 * (2 * q() + i));
                KV_UNROLL for (int piece = 0; piece < PIECES; piece++) {
                    KV_UNROLL for (int j = 0; j < VALUE_TILES; j++) {
                        output[piece][j][tile][i] *= factor;
                        output[piece][j][tile][i + 2] *= factor;
                    }
                }
            }
        }
    }

    // From products to weights of the tokens base <= t < end; `distance` is base + 1 - context.
    __device__ __forceinline__ void weigh(int base, int end, int distance, bool first) {
        constexpr int SCORES = 4 * TILES;  // of a group
        KV_UNROLL for (int i = 0; i < GROUPS * SCORES; i++) {
            const int eight = i / (SCORES / 2), tile = i / 2 % TILES, next = i % 2;
            float& score = scores[eight / 2][eight % 2][tile][next];
            score = scoring(score, distance + 8 * eight + 2 * q() + next, slope[tile], reference[tile]);
        }
        if (base + TOKENS > end) {
            KV_UNROLL for (int i = 0; i < GROUPS * SCORES; i++) {
                const int eight = i / (SCORES / 2), tile = i / 2 % TILES, next = i % 2;
                const int token = base + 8 * eight + 2 * q() + next;
                if (token >= end) scores[eight / 2][eight % 2][tile][next] = minus_infinity();
            }
        }
        float highest = minus_infinity();
        KV_UNROLL for (int i = 0; i < GROUPS * SCORES; i++) {
            const int eight = i / (SCORES / 2), tile = i / 2 % TILES;
            highest = fmaxf(highest, scores[eight / 2][eight % 2][tile][i % 2]);
        }
        if (__any_sync(ALL_LANES, first || highest > LAZY_LOG2)) follow_maximum(first);
        KV_UNROLL for (int i = 0; i < GROUPS * SCORES / 2; i++) {
            const int eight = i / TILES, tile = i % TILES;
            const float* score = scores[eight / 2][eight % 2][tile];
            const float weight = fast_exp2(score[0]), next = fast_exp2(score[1]);
            sum[tile] += weight + next;
            weights[eight / 2][tile][eight % 2] = pack(weight, next);
        }
    }

    // Leaves the warp's results in shared memory.
    __device__ __forceinline__ void finish(bool exist, bool none, Results& results) {
        sync_sharers();  // The last scores have been read.
        KV_UNROLL for (int tile = 0; tile < TILES; tile++) {
            float total = exist ? sum[tile] : not_a_number();
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            const int first = 8 * tile;
            if (q() == 0 && sharer() == 0) {
                results.maximum[key_warp()][first + g()] = none ? NO_SCORE : reference[tile];
                results.sum[key_warp()][first + g()] = total;
            }
            KV_UNROLL for (int piece = 0; piece < PIECES; piece++) {
                KV_UNROLL for (int j = 0; j < VALUE_TILES; j++) {
                    const int d = sharer() * DIMS + (8 * piece + g()) * VALUE_ELEMENTS + 2 * j;
                    KV_UNROLL for (int i = 0; i < 4; i++) {
                        results.values[key_warp()][first + 2 * q() + i % 2][d + i / 2] = output[piece][j][tile][i];
                    }
                }
            }
        }
    }
};

template <class T, class KV, int HEAD_DIM, int HEADS, class O>
__device__ __forceinline__ void mma_attention(const PagedAttentionParams& p) {
    using Warp = Mma<T, KV, HEAD_DIM, HEADS, O>;
    using Results = typename Warp::Results;
    constexpr int STRIDE = Warp::TOKENS * Warp::KEY_WARPS;
    KV_SHARED(Results, results);
    const WorkItem item = work_item_of(p);
    const int kv_head = kv_head_of(p, item);
    const int context = O::ALIBI ? ldg(p.context_lens + item.request) : 0;
    const long long head_bytes = kv_head * p.cache_stride_head * (long long)sizeof(KV);
    const long long first_byte = head_bytes + Warp::sharer() * Warp::ROW_BYTES;
    const char* keys = as_one((const char*)p.key_cache + first_byte + Warp::KEY_BYTES * Warp::q());
    const char* values = as_one((const char*)p.value_cache + first_byte + Warp::VALUE_BYTES * Warp::g());

    Warp state(p, item, kv_head);
    TokenRows<KV, Warp::LOOKUPS> rows(p, item);
    const bool exist = blocks_exist(p, item.request, item.begin, item.end);
    const int end = exist ? item.end : item.begin;
    int base = item.begin + Warp::key_warp() * Warp::TOKENS;
    const bool none = base >= end;
    bool more = !none, first = true;
    int place = 0;
    if (more) {
        rows.ask(p, base);
        rows.resolve(p, base);
        rows.ask(p, base + STRIDE);
        KV_UNROLL for (int group = 0; group < Warp::GROUPS; group++) state.load_keys(keys, rows, group);
    }
    while (more) {
        KV_UNROLL for (int group = 0; group < Warp::GROUPS; group++) state.use_keys(values, rows, group);
        state.share_scores(*results, place);
        place ^= 1;
        state.weigh(base, end, base + 1 - context, first);
        first = false;
        base += STRIDE;
        more = base < end;
        if (more) {
            rows.resolve(p, base);
            rows.ask(p, base + STRIDE);
        }
        KV_UNROLL for (int group = 0; group < Warp::GROUPS; group++) state.use_values(keys, rows, group, more);
    }
    state.finish(exist, none, *results);
    write_results<T, KV>(p, *results);
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// merge: a block of threads for each (query head, split request) = (blockIdx.x, blockIdx.y).
// ---------------------------------------------------------------------------------------------------------------------

template <class T, int HEAD_DIM>
__device__ __forceinline__ void merge_partials(const PagedAttentionParams& p) {
    const MergeItem* item = p.merge_items + blockIdx.y;
    const int request = ldg(&item->request), num_splits = ldg(&item->num_splits);
    const long long first = (long long)ldg(&item->first_partial) + blockIdx.x;

    float maximum = NO_SCORE;
    for (int s = 0; s < num_splits; s++) {
        maximum = fmaxf(maximum, ldg(p.partial_lse + first + (long long)s * p.num_heads));
    }
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        float output = 0.0f, sum = 0.0f;
        for (int s = 0; s < num_splits; s++) {
            const long long row = first + (long long)s * p.num_heads;
            const float weight = fast_exp2(ldg(p.partial_lse + row) - maximum);
            output += weight * ldg(p.partial_output + row * HEAD_DIM + d);
            sum += weight;
        }
        const long long row = (long long)request * p.num_heads + blockIdx.x;
        T stored;
        from_float(sum == 0.0f ? 0.0f : output / sum, stored);
        stg((T*)p.output + row * HEAD_DIM + d, stored);
        if (p.lse != nullptr && d == 0) stg(p.lse + row, natural_lse(maximum, sum));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The cache's companions.
// ---------------------------------------------------------------------------------------------------------------------

// A block of threads for each token; each thread takes 8 elements of one head of the key, then of the value.
template <class T, class KV, int HEAD_DIM>
__device__ __forceinline__ void store_row(
    const T* row, KV* cache, const float* scales, const ReshapeAndCacheParams& p
) {
    constexpr int PART = 8;
    constexpr int PARTS = HEAD_DIM / PART;
    constexpr int VECTORS = PART * sizeof(T) / 16;
    for (int i = threadIdx.x; i < p.num_kv_heads * PARTS; i += THREADS) {
        const int head = i / PARTS, d = i % PARTS * PART;
        const T* from = row + head * HEAD_DIM + d;
        KV* to = cache + head * p.cache_stride_head + d;
        if constexpr (sizeof(KV) == sizeof(T)) {
            for (int v = 0; v < VECTORS; v++) stg128((uint4*)to + v, ldg128((const uint4*)from + v));
        } else {
            const float scale = scales == nullptr ? 1.0f : ldg(scales + (long long)head * p.scale_stride);
            float x[PART];
            for (int v = 0; v < VECTORS; v++) decode<T>(ldg128((const uint4*)from + v), x + v * PART / VECTORS);
            unsigned codes[2] = {0u, 0u};
            for (int e = 0; e < PART; e++) codes[e / 4] |= (unsigned)float_to_e4m3(x[e] / scale) << e % 4 * 8;
            stg((uint2*)to, make_uint2(codes[0], codes[1]));
        }
    }
}

template <class T, class KV, int HEAD_DIM>
__device__ __forceinline__ void reshape_and_cache(const ReshapeAndCacheParams& p) {
    const long long token = blockIdx.x, slot = ldg(p.slot_mapping + token);
    if (slot < 0 || slot >= p.num_slots) return;
    const long long block_id = slot >> p.block_size_log2;
    const long long row = block_id * p.cache_rows_per_block + (slot - (block_id << p.block_size_log2));
    const long long place = row * p.cache_stride_row;
    store_row<T, KV, HEAD_DIM>(
        (const T*)p.key + token * p.key_stride_token, (KV*)p.key_cache + place, p.key_scale, p
    );
    store_row<T, KV, HEAD_DIM>(
        (const T*)p.value + token * p.value_stride_token, (KV*)p.value_cache + place, p.value_scale, p
    );
}

// A block of threads for each (pair, layer) = (blockIdx.x, blockIdx.y).
__device__ __forceinline__ void copy_blocks(const CopyBlocksParams& p) {
    const long long source = ldg(p.block_pairs + 2LL * blockIdx.x) * p.block_bytes;
    const long long target = ldg(p.block_pairs + 2LL * blockIdx.x + 1) * p.block_bytes;
    char* keys = (char*)ldg(p.key_caches + blockIdx.y);
    char* values = (char*)ldg(p.value_caches + blockIdx.y);
    for (long long i = 16LL * threadIdx.x; i < p.block_bytes; i += 16LL * THREADS) {
        stg128(keys + target + i, ldg128(keys + source + i));
        stg128(values + target + i, ldg128(values + source + i));
    }
}
