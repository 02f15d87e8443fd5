// Paged attention for decoding: one query token per request, keys and values in blocks.
//
// One source without any include, built as it stands by NVRTC, by nvcc and, with KV_EMULATED defined and a shim in front,
// by a C++17 compiler. All kernels are templates; an `extern "C"` instance per variant is appended to this text
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
//   extern "C" __global__ void __launch_bounds__(THREADS) NAME(const PagedAttentionParams p) { naive_attention<...>(p); }
// and is launched with THREADS threads and the bytes of shared memory that the kernel's comment says.

// ---------------------------------------------------------------------------------------------------------------------
// What only a GPU has. With KV_EMULATED the shim in front of this text provides the names marked "shim:".
// ---------------------------------------------------------------------------------------------------------------------

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

// shim: stg128.
__device__ __forceinline__ void stg128(void* address, uint4 v) {
    *reinterpret_cast<uint4*>(address) = v;
}

// shim: stg.
template <class T>
__device__ __forceinline__ void stg(T* address, T value) {
    *address = value;
}

// shim: fast_exp2. 2^x, relative error about 2^-22; 2^-inf is 0.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// shim: transpose_8x8. `movmatrix`: the warp holds an 8x8 matrix of 16-bit values, lane l having (row l/4, columns
// 2(l%4) and 2(l%4)+1); it gets the transposed matrix in the same layout. All 32 lanes take part.
__device__ __forceinline__ unsigned transpose_8x8(unsigned rows) {
    unsigned columns;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
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
__device__ __forceinline__ unsigned e4m3x2_to_half2(unsigned short pair) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
#endif

#endif  // KV_EMULATED

// ---------------------------------------------------------------------------------------------------------------------
// Number formats. Storage types are raw bits; these converters are plain C++ and the twins of the instructions above.
// ---------------------------------------------------------------------------------------------------------------------

#ifndef KV_E4M3_CVT
#define KV_E4M3_CVT 0
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

// e4m3 to fp16, four at a time. With the instruction (sm_89 and newer) the pairs are (0, 1) and (2, 3) and the values are
// exact; by shifting bits (everywhere) the pairs are (0, 2) and (1, 3), values are 256 times too small, since fp16's
// exponent bias is larger by 8, and the NaN code reads as 480.
#if KV_E4M3_CVT
#ifdef KV_EMULATED
__device__ __forceinline__ unsigned short e4m3_to_half(unsigned code) {
    const unsigned sign = (code & 0x80u) << 8, magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return (unsigned short)(sign | 0x7e00u);
    return (unsigned short)(sign | float_to_half(half_to_float((unsigned short)(magnitude << 7)) * 256.0f));
}

__device__ __forceinline__ unsigned e4m3x2_to_half2(unsigned short pair) {
    return e4m3_to_half(pair & 0xffu) | (unsigned)e4m3_to_half(pair >> 8) << 16;
}
#endif
constexpr float E4M3_UNIT = 1.0f;

__device__ __forceinline__ void e4m3x4_to_half2x2(unsigned codes, unsigned halves[2]) {
    halves[0] = e4m3x2_to_half2((unsigned short)codes);
    halves[1] = e4m3x2_to_half2((unsigned short)(codes >> 16));
}
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
__device__ __forceinline__ void from_float(float x, E4m3& y) { y.bits = float_to_e4m3(x); }

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
    const void* key_cache;         // block b, token slot s, KV head h at b, s, h times their strides
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
    long long cache_stride_block;
    long long cache_stride_token;
    long long cache_stride_head;
    int block_table_stride;
    int num_heads;
    int num_kv_heads;
    int num_blocks;                // of the cache: ids outside are not followed and make the result NaN
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
    long long cache_stride_block;
    long long cache_stride_token;
    long long cache_stride_head;
    long long num_slots;           // of the cache; a slot beyond is skipped
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
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

// Compile-time options: in a loop that is short of issue slots a branch that is never taken costs too.
template <bool ALIBI_, bool SOFT_CAP_>
struct Options {
    static constexpr bool ALIBI = ALIBI_;
    static constexpr bool SOFT_CAP = SOFT_CAP_;
};

// What turns the product of a query head and a stored key into a score in units of log2.
template <class O>
struct Scoring {
    float scale;  // of the product; with a soft cap its result is in units of the cap
    float cap;
    float slope;

    __device__ __forceinline__ Scoring(const PagedAttentionParams& p, int head, int kv_head) {
        const float key_scale = p.key_scale == nullptr ? 1.0f : ldg(p.key_scale + (long long)kv_head * p.scale_stride);
        scale = p.scale * key_scale * (O::SOFT_CAP ? 1.0f / p.soft_cap : LOG2_E);
        cap = O::SOFT_CAP ? p.soft_cap * LOG2_E : 0.0f;
        slope = O::ALIBI ? ldg(p.alibi_slopes + head) * LOG2_E : 0.0f;
    }

    // `distance` is token + 1 - context: 0 for the newest token, which ALiBi leaves alone.
    __device__ __forceinline__ float operator()(float product, int distance) const {
        float score = product * scale;
        if (O::SOFT_CAP) score = cap * tanhf(score);
        if (O::ALIBI) score += slope * (float)distance;
        return score;
    }
};

__device__ __forceinline__ float value_scale_of(const PagedAttentionParams& p, int kv_head) {
    return p.value_scale == nullptr ? 1.0f : ldg(p.value_scale + (long long)kv_head * p.scale_stride);
}

// Where a token's key and value lie: elements from the start of the cache, for KV head 0. An id that is no block's leads
// to block 0, which may be read, and clears `known`.
__device__ __forceinline__ long long row_of(const PagedAttentionParams& p, int request, int token, bool& known) {
    const int block_id = ldg(p.block_table + (long long)request * p.block_table_stride + (token >> p.block_size_log2));
    const bool inside = (unsigned)block_id < (unsigned)p.num_blocks;
    known = known && inside;
    const int slot = token & ((1 << p.block_size_log2) - 1);
    return (inside ? block_id : 0) * p.cache_stride_block + slot * p.cache_stride_token;
}

__device__ __forceinline__ float natural_lse(float maximum, float sum) {
    return sum > 0.0f ? maximum * LN_2 + logf(sum) : (sum == 0.0f ? MINUS_INFINITY : sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// naive: a block of threads for each (query head, request) = (blockIdx.x, blockIdx.y).
//
// Each thread walks its own keys element by element, so that a warp touches 32 rows for 32 elements; each KV head is read
// once for every query head; batch x heads blocks are all there is to run. It is here to be compared with.
// Shared memory: THREADS floats, then one for each token.
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
    const Scoring<O> scoring(p, head, kv_head);

    bool known = true;
    float maximum = NO_SCORE;
    for (int t = begin + threadIdx.x; t < context; t += THREADS) {
        const KV* key = keys + row_of(p, request, t, known);
        float product = 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) product += to_float(ldg(query + d)) * to_float(ldg(key + d));
        const float score = scoring(product, t + 1 - context);
        scores[t - begin] = score;
        maximum = fmaxf(maximum, score);
    }
    maximum = reduce_block<true>(maximum, scratch);

    float sum = known ? 0.0f : __uint_as_float(0x7fffffffu);
    for (int t = begin + threadIdx.x; t < context; t += THREADS) {
        const float weight = fast_exp2(scores[t - begin] - maximum);
        scores[t - begin] = weight;
        sum += weight;
    }
    sum = reduce_block<false>(sum, scratch);

    const long long row = (long long)request * p.num_heads + head;
    const float factor = sum == 0.0f ? 0.0f : value_scale_of(p, kv_head) / sum;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        float output = 0.0f;
        for (int t = begin; t < context; t++) {
            output += scores[t - begin] * to_float(ldg(values + row_of(p, request, t, known) + d));
        }
        T stored;
        from_float(output * factor, stored);
        stg((T*)p.output + row * HEAD_DIM + d, stored);
    }
    if (p.lse != nullptr && threadIdx.x == 0) stg(p.lse + row, natural_lse(maximum, sum));
}

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
    for (int i = threadIdx.x; i < p.num_kv_heads * PARTS; i += THREADS) {
        const int head = i / PARTS, d = i % PARTS * PART;
        const float scale = scales == nullptr ? 1.0f : ldg(scales + (long long)head * p.scale_stride);
        alignas(16) T from[PART];
        alignas(16) KV to[PART];
        for (int v = 0; v < (int)sizeof(from) / 16; v++) {
            ((uint4*)from)[v] = ldg128((const uint4*)(row + (long long)head * HEAD_DIM + d) + v);
        }
        for (int e = 0; e < PART; e++) {
            if constexpr (sizeof(KV) == sizeof(T)) {
                __builtin_memcpy(&to[e], &from[e], sizeof(T));
            } else {
                from_float(to_float(from[e]) / scale, to[e]);
            }
        }
        KV* target = cache + head * p.cache_stride_head + d;
        if constexpr (sizeof(to) == 8) {
            stg((uint2*)target, *(const uint2*)to);
        } else {
            for (int v = 0; v < (int)sizeof(to) / 16; v++) stg128((uint4*)target + v, ((const uint4*)to)[v]);
        }
    }
}

template <class T, class KV, int HEAD_DIM>
__device__ __forceinline__ void reshape_and_cache(const ReshapeAndCacheParams& p) {
    const long long token = blockIdx.x, slot = ldg(p.slot_mapping + token);
    if (slot < 0 || slot >= p.num_slots) return;
    const long long place = (slot >> p.block_size_log2) * p.cache_stride_block +
                            (slot & ((1 << p.block_size_log2) - 1)) * p.cache_stride_token;
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
