// The first paged kernel that this project started from, in the terms of paged_attention.cu, after which it is built.
// Kept for its faults, which the emulator has to find: every thread exponentiates and normalises the whole array of
// scores in place (a race), and nothing masks the last block (unused slots take part).

extern "C" __global__ void naive_racy(const PagedAttentionParams p) {
    KV_SHARED(float, scores);
    const int head = blockIdx.x, request = blockIdx.y, kv_head = head / (p.num_heads / p.num_kv_heads);
    const int block_size = 1 << p.block_size_log2;
    const int num_blocks = (ldg(p.context_lens + request) + block_size - 1) / block_size;
    const int tokens = RACY_MASKED ? ldg(p.context_lens + request) : num_blocks * block_size;
    const float* query = (const float*)p.query + request * p.query_stride_request + head * p.query_stride_head;
    const float* keys = (const float*)p.key_cache + kv_head * p.cache_stride_head;
    const float* values = (const float*)p.value_cache + kv_head * p.cache_stride_head;

    for (int t = threadIdx.x; t < tokens; t += blockDim.x) {
        const float* key = keys + row_of(p, request, t);
        float product = 0.0f;
        for (int d = 0; d < RACY_HEAD_DIM; d++) product += ldg(query + d) * ldg(key + d);
        scores[t] = product * p.scale;
    }
    __syncthreads();

    float maximum = scores[0];
    for (int t = 1; t < tokens; t++) maximum = fmaxf(maximum, scores[t]);
    float sum = 0.0f;
    for (int t = 0; t < tokens; t++) {
        scores[t] = expf(scores[t] - maximum);  // race
        sum += scores[t];                       // race
    }
    for (int t = 0; t < tokens; t++) scores[t] /= sum;  // race
    __syncthreads();

    for (int d = threadIdx.x; d < RACY_HEAD_DIM; d += blockDim.x) {
        float output = 0.0f;
        for (int t = 0; t < tokens; t++) output += scores[t] * ldg(values + row_of(p, request, t) + d);
        stg((float*)p.output + ((long long)request * p.num_heads + head) * RACY_HEAD_DIM + d, output);
    }
}
