/* rope.cu - RMS norm of each query and key head (where the model has it), then rotation by position; and back.
 *
 * Queries and keys are two launches of the same kernel.  An item is one head of one token; a team of lanes takes an
 * item: each lane holds a piece of the head's first half and its partner in the second.  A block takes a tile of
 * neighbouring items.
 * The gradient of a norm's weight is a sum over items: a lane adds up its own elements over the tile, the block's
 * teams are added in order, and the tiles by fb_cuda_sum_partials. */
#include <assert.h>

#include "device/cuda/vec.cuh"

enum {
    ROPE_THREADS = 128,
    ROPE_HEAD_DIM_MAX = 256,
    ROPE_WALK = 4,         /* elements of a half that a lane takes when pieces do not cover it: 32 lanes, 128 elements */
    NORM_GRAD_TILES = 792, /* six for each of 132 multiprocessors */
    NORM_GRAD_ROUNDS = 4,  /* of all the block's teams: worth a tile */
};
static_assert(NORM_GRAD_TILES * ROPE_HEAD_DIM_MAX * sizeof(float) <= FB_CUDA_WORKSPACE_SIZE, "the tiles' sums fit");

/* Queries or keys: n_head of them a token, `apart` [T, n_head, D], or in qkv from column `first`, rows `ld` long. */
template <typename T>
struct rope_args {
    uint32_t        n_item, n_head, head_dim, first, ld;
    float           eps;
    const uint32_t *position;
    const float    *cos, *sin;
    const T        *weight;   /* of the norm, or NULL */
    const T        *qkv;
    T              *apart;    /* forward: written */
    const T        *d_apart;  /* backward: read */
    T              *dqkv;     /* backward: written */
    float          *partial;  /* backward with norm: [gridDim.x, D] */
};

/* A lane's pieces of both halves of a head, widened. */
template <int N, int STEPS>
struct rope_halves {
    float a[STEPS][N], b[STEPS][N];
};

template <int N>
__device__ inline uint32_t rope_at(int step)
{
    return (threadIdx.x + step * blockDim.x) * N;
}

/* Two rows of `half` elements each; zeros where a lane has none, or all when there is nothing to be had. */
template <int N, int STEPS, typename T>
__device__ inline void rope_load(rope_halves<N, STEPS> &to, const T *a, const T *b, uint32_t half, bool any)
{
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        uint32_t i = rope_at<N>(s);
        bool mine = any && i < half;
        fb_piece<T, N> piece_a, piece_b;
        if (mine) {
            piece_a = fb_load<N>(a + i);
            piece_b = fb_load<N>(b + i);
        }
#pragma unroll
        for (int e = 0; e < N; e++) {
            to.a[s][e] = mine ? piece_a[e] : 0.0f;
            to.b[s][e] = mine ? piece_b[e] : 0.0f;
        }
    }
}

template <int N, int STEPS, typename T>
__device__ inline void rope_store(T *to, const rope_halves<N, STEPS> &v, uint32_t half)
{
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        uint32_t i = rope_at<N>(s);
        if (i < half) {
            fb_store(to + i, fb_narrow<T>(v.a[s]));
            fb_store(to + half + i, fb_narrow<T>(v.b[s]));
        }
    }
}

/* Item numbers are cut by the grid alone. */
__device__ inline uint32_t rope_edge(uint32_t n_item, uint32_t tile)
{
    return (uint32_t)((uint64_t)n_item * tile / gridDim.x);
}

template <typename T, int N, int STEPS, bool NORM>
__global__ void __launch_bounds__(ROPE_THREADS)
rope_forward(rope_args<T> r)
{
    uint32_t half = r.head_dim / 2, end = rope_edge(r.n_item, blockIdx.x + 1);
    rope_halves<N, STEPS> angle, x, w;
    if constexpr (NORM)
        rope_load(w, r.weight, r.weight + half, half, true);
    /* All teams go round equally often: lanes of one warp add up together. */
    for (uint32_t first = rope_edge(r.n_item, blockIdx.x); first < end; first += blockDim.y) {
        uint32_t item = first + threadIdx.y, t = item / r.n_head;
        bool any = item < end;
        uint64_t turn = any ? (uint64_t)r.position[t] * half : 0;
        const T *from = r.qkv + (uint64_t)t * r.ld + r.first + (item - t * r.n_head) * r.head_dim;
        rope_load(x, from, from + half, half, any);
        rope_load(angle, r.cos + turn, r.sin + turn, half, any);
        if constexpr (NORM) {
            float sum = 0;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int e = 0; e < N; e++)
                    sum += x.a[s][e] * x.a[s][e] + x.b[s][e] * x.b[s][e];
            float rstd = 1.0f / sqrtf(fb_lanes_sum(sum, blockDim.x) / (float)r.head_dim + r.eps);
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int e = 0; e < N; e++) {
                    x.a[s][e] = fb_round_to<T>(fb_round_to<T>(x.a[s][e] * rstd) * w.a[s][e]);
                    x.b[s][e] = fb_round_to<T>(fb_round_to<T>(x.b[s][e] * rstd) * w.b[s][e]);
                }
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int e = 0; e < N; e++) {
                float a = x.a[s][e], b = x.b[s][e], cos = angle.a[s][e], sin = angle.b[s][e];
                x.a[s][e] = a * cos - b * sin;
                x.b[s][e] = b * cos + a * sin;
            }
        if (any)
            rope_store(r.apart + (uint64_t)item * r.head_dim, x, half);
    }
}

/* A rotation's gradient is rotated back; through y = x rstd w it is, with n = x rstd and dn = w dy,
 * dx = rstd (dn - n mean(dn n)),  and dw += dy n, n as the forward rounded it. */
template <typename T, int N, int STEPS, bool NORM>
__global__ void __launch_bounds__(ROPE_THREADS)
rope_backward(rope_args<T> r)
{
    extern __shared__ __align__(16) float teams[]; /* NORM: [blockDim.y, D] */
    uint32_t half = r.head_dim / 2, end = rope_edge(r.n_item, blockIdx.x + 1);
    rope_halves<N, STEPS> angle, x, w, dy, dw = {};
    if constexpr (NORM)
        rope_load(w, r.weight, r.weight + half, half, true);
    for (uint32_t first = rope_edge(r.n_item, blockIdx.x); first < end; first += blockDim.y) {
        uint32_t item = first + threadIdx.y, t = item / r.n_head;
        bool any = item < end;
        uint64_t turn = any ? (uint64_t)r.position[t] * half : 0;
        uint64_t packed = (uint64_t)t * r.ld + r.first + (item - t * r.n_head) * r.head_dim;
        const T *from = r.d_apart + (uint64_t)item * r.head_dim;
        rope_load(dy, from, from + half, half, any);
        rope_load(angle, r.cos + turn, r.sin + turn, half, any);
        if constexpr (NORM)
            rope_load(x, r.qkv + packed, r.qkv + packed + half, half, any);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int e = 0; e < N; e++) {
                float a = dy.a[s][e], b = dy.b[s][e], cos = angle.a[s][e], sin = angle.b[s][e];
                dy.a[s][e] = a * cos + b * sin;
                dy.b[s][e] = b * cos - a * sin;
            }
        if constexpr (NORM) {
            float square_sum = 0, dot = 0;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int e = 0; e < N; e++) {
                    square_sum += x.a[s][e] * x.a[s][e] + x.b[s][e] * x.b[s][e];
                    dot += dy.a[s][e] * w.a[s][e] * x.a[s][e] + dy.b[s][e] * w.b[s][e] * x.b[s][e];
                }
            float rstd = 1.0f / sqrtf(fb_lanes_sum(square_sum, blockDim.x) / (float)r.head_dim + r.eps);
            float mean = fb_lanes_sum(dot, blockDim.x) * rstd / (float)r.head_dim;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int e = 0; e < N; e++) {
                    float n_a = x.a[s][e] * rstd, n_b = x.b[s][e] * rstd;
                    dw.a[s][e] += dy.a[s][e] * fb_round_to<T>(n_a);
                    dw.b[s][e] += dy.b[s][e] * fb_round_to<T>(n_b);
                    dy.a[s][e] = rstd * (dy.a[s][e] * w.a[s][e] - n_a * mean);
                    dy.b[s][e] = rstd * (dy.b[s][e] * w.b[s][e] - n_b * mean);
                }
        }
        if (any)
            rope_store(r.dqkv + packed, dy, half);
    }
    if constexpr (NORM) {
        rope_store(teams + threadIdx.y * r.head_dim, dw, half);
        __syncthreads();
        for (uint32_t i = threadIdx.y * blockDim.x + threadIdx.x; i < r.head_dim; i += blockDim.x * blockDim.y) {
            float sum = 0;
            for (uint32_t team = 0; team < blockDim.y; team++)
                sum += teams[team * r.head_dim + i];
            r.partial[(uint64_t)blockIdx.x * r.head_dim + i] = sum;
        }
    }
}

/* Blocks that are launched; 0: nothing to do. */
template <typename T, int N, int STEPS>
static uint32_t rope_launch(cudaStream_t s, const rope_args<T> &r)
{
    unsigned team = 1, pieces = STEPS > 1 ? 32 : r.head_dim / 2 / N;
    while (team < pieces)
        team *= 2;
    dim3 block(team, ROPE_THREADS / team);
    uint32_t tiles = (uint32_t)fb_cuda_ceil_div(r.n_item, block.y);
    if (tiles == 0)
        return 0;
    if (r.dqkv && r.weight) {
        tiles = (uint32_t)fb_cuda_ceil_div(tiles, NORM_GRAD_ROUNDS);
        tiles = tiles < NORM_GRAD_TILES ? tiles : (uint32_t)NORM_GRAD_TILES;
        rope_backward<T, N, STEPS, true><<<tiles, block, block.y * r.head_dim * sizeof(float), s>>>(r);
    } else if (r.dqkv) {
        rope_backward<T, N, STEPS, false><<<tiles, block, 0, s>>>(r);
    } else if (r.weight) {
        rope_forward<T, N, STEPS, true><<<tiles, block, 0, s>>>(r);
    } else {
        rope_forward<T, N, STEPS, false><<<tiles, block, 0, s>>>(r);
    }
    return tiles;
}

/* b NULL: the forward. */
template <typename T>
static uint32_t rope_run(cudaStream_t s, const fb_rope_qk *f, const fb_rope_qk_bwd *b, bool is_key, float *partial)
{
    uint32_t n_head = is_key ? f->n_kv_head : f->n_head;
    rope_args<T> r = { f->t * n_head, n_head, f->head_dim, is_key ? f->n_head * f->head_dim : 0,
                       (f->n_head + 2 * f->n_kv_head) * f->head_dim, f->eps, f->position, f->cos, f->sin,
                       (const T *)(is_key ? f->k_norm : f->q_norm), (const T *)f->qkv, (T *)(is_key ? f->k : f->q),
                       b ? (const T *)(is_key ? b->dk : b->dq) : nullptr, b ? (T *)b->dqkv : nullptr, partial };
    if (fb_cuda_whole_pieces<T>(f->head_dim / 2))
        return rope_launch<T, fb_wide_piece<T>, 1>(s, r);
    return rope_launch<T, 1, ROPE_WALK>(s, r);
}

static fb_status rope_check(const fb_rope_qk *f, fb_error *err)
{
    assert(!f->q_norm == !f->k_norm);
    assert((uint64_t)f->t * f->n_head <= UINT32_MAX - ROPE_THREADS && f->n_kv_head <= f->n_head);
    if (f->head_dim % 2 || f->head_dim > ROPE_HEAD_DIM_MAX)
        return fb_fail(err, FB_CONFIG, "cuda: head_dim is %u; rotary embedding wants an even one, at most %d", f->head_dim,
                       (int)ROPE_HEAD_DIM_MAX);
    return FB_OK;
}

fb_status fb_cuda_rope_qk(fb_device *d, const fb_rope_qk *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    FB_CUDA_OK(rope_check(a, err));
    for (int is_key = 0; is_key < 2; is_key++)
        FB_CUDA_BY_DTYPE(a->act, rope_run, fb_cuda_compute(c), a, nullptr, is_key, nullptr);
    return fb_cuda_launched(c, "rope_qk", err);
}

fb_status fb_cuda_rope_qk_bwd(fb_device *d, const fb_rope_qk_bwd *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    const fb_rope_qk *f = &a->fwd;
    float *partial = (float *)c->workspace;
    FB_CUDA_OK(rope_check(f, err));
    for (int is_key = 0; is_key < 2; is_key++) {
        uint32_t tiles = FB_CUDA_BY_DTYPE(f->act, rope_run, fb_cuda_compute(c), f, a, is_key, partial);
        if (f->q_norm)
            FB_CUDA_OK(fb_cuda_sum_partials(c, partial, tiles, f->head_dim, f->head_dim, is_key ? a->dk_norm : a->dq_norm,
                                            a->accumulate, "rope_qk_bwd", err));
    }
    return fb_cuda_launched(c, "rope_qk_bwd", err);
}
