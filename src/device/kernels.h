/* kernels.h - the mathematics a device must offer, one entry an operation.
 *
 * Notation: T tokens of a micro-batch (all its documents laid end to end, no padding), C hidden, D head_dim, H query
 * heads, G key-value heads, F ffn_dim, V vocabulary.  All matrices row-major; `ld` is the distance in elements between
 * rows.  `act` is the dtype of activations and working weights (FB_F32 or FB_BF16); weight gradients, rstd, lse and
 * losses are always float32 (sums over blocks and losses double).
 * bf16 means: operands are widened exactly, everything is computed in float32, results are rounded once, to nearest
 * even, where they are stored.
 * Same bits for any number of threads: work is cut into tiles that depend on the shapes alone.
 * Every pointer is device memory, 16-byte aligned at least, unless said otherwise.  Arguments are copied at the call.
 * All run on FB_STREAM_COMPUTE, in call order. */
#ifndef FB_DEVICE_KERNELS_H
#define FB_DEVICE_KERNELS_H

#include "base/dtype.h"
#include "device/device.h"
#include "optim/adamw.h"

/* One document: queries [q_start, q_start + q_len) of the micro-batch attend to keys [k_start, k_start + k_len).
 * In training both ranges are the same; with a key-value cache k_len >= q_len and the last query sees the last key. */
typedef struct fb_span {
    uint32_t q_start, q_len, k_start, k_len;
} fb_span;

/* y[M,N] = x[M,K] w[N,K]^T (+ bias[N]) (+ add[M,N]);  bias, add may be NULL; add may be y.
 * Everything of dtype act, except y, which is y_dtype (logits stay float32). */
typedef struct fb_matmul_nt {
    fb_dtype act, y_dtype;
    uint32_t m, n, k;
    const void *x; uint64_t x_ld;
    const void *w; uint64_t w_ld;
    const void *bias;
    const void *add; uint64_t add_ld;
    void *y; uint64_t y_ld;
} fb_matmul_nt;

/* dx[M,K] = dy[M,N] w[N,K].  All of dtype act. */
typedef struct fb_matmul_nn {
    fb_dtype act;
    uint32_t m, n, k;
    const void *dy; uint64_t dy_ld;
    const void *w; uint64_t w_ld;
    void *dx; uint64_t dx_ld;
} fb_matmul_nn;

/* dw[N,K] (+)= dy[M,N]^T x[M,K];  dw float32, contiguous.  accumulate false: overwritten. */
typedef struct fb_matmul_tn {
    fb_dtype act;
    uint32_t m, n, k;
    const void *dy; uint64_t dy_ld;
    const void *x; uint64_t x_ld;
    float *dw;
    bool accumulate;
} fb_matmul_tn;

/* db[N] (+)= sum over m of dy[m,n], in order of m within fixed tiles. */
typedef struct fb_bias_grad {
    fb_dtype act;
    uint32_t m, n;
    const void *dy; uint64_t dy_ld;
    float *db;
    bool accumulate;
} fb_bias_grad;

/* y[t,:] = x[t,:] * rstd[t] * w,  rstd[t] = 1 / sqrt(mean(x[t,:]^2) + eps).  Zhang & Sennrich 2019, eq. 4.
 * As transformers: in bf16 x * rstd is rounded to bf16 before it is multiplied with w. */
typedef struct fb_rms_norm {
    fb_dtype act;
    uint32_t t, c;
    float eps;
    const void *x;   /* [T,C] */
    const void *w;   /* [C] */
    void *y;         /* [T,C] */
    float *rstd;     /* [T] */
} fb_rms_norm;

/* dx = (add ? add : 0) + d(rms_norm)/dx * dy;  dw (+)= sum_t dy * x * rstd[t].  add may be dx, or NULL. */
typedef struct fb_rms_norm_bwd {
    fb_dtype act;
    uint32_t t, c;
    const void *x, *w, *dy; /* [T,C], [C], [T,C] */
    const float *rstd;      /* [T] */
    const void *add;        /* [T,C] */
    void *dx;               /* [T,C] */
    float *dw;              /* [C] */
    bool accumulate;
} fb_rms_norm_bwd;

/* For each token and head: (optional) RMS norm over D with weight q_norm / k_norm, then rotary embedding by halves:
 * with (a, b) the halves of the head, y = (a cos - b sin, b cos + a sin), cos = cos[position[t]][:].
 * qkv [T, (H + 2G) D] -> q [T, H D], k [T, G D] (v is read from qkv by attention). */
typedef struct fb_rope_qk {
    fb_dtype act;
    uint32_t t, n_head, n_kv_head, head_dim;
    float eps;
    const void *qkv;
    const void *q_norm, *k_norm;  /* [D] or both NULL */
    const uint32_t *position;     /* [T] */
    const float *cos, *sin;       /* [positions, D / 2] */
    void *q, *k;
} fb_rope_qk;

/* Backward of fb_rope_qk: dq [T, H D], dk [T, G D] -> the q and k parts of dqkv [T, (H + 2G) D] (the v part is left
 * alone); with norms also dq_norm, dk_norm [D] (+)=. */
typedef struct fb_rope_qk_bwd {
    fb_rope_qk fwd;               /* the forward's arguments; q, k unused */
    const void *dq, *dk;
    void *dqkv;
    float *dq_norm, *dk_norm;
    bool accumulate;
} fb_rope_qk_bwd;

/* o = softmax(scale * q k^T + mask) v per document and head; causal; query head h uses key-value head h / (H / G).
 * Source: Vaswani et al. 2017, eq. 1; streaming softmax: Milakov & Gimelshein 2018.
 * window w > 0: the query at position i sees keys at positions > i - w.  lse[h * T + t] = log of the softmax's sum,
 * scaled scores included (float32), for the backward. */
typedef struct fb_attention {
    fb_dtype act;
    uint32_t t, n_head, n_kv_head, head_dim, window;
    float scale;
    const fb_span *span; uint32_t n_span; /* device memory */
    uint32_t q_len_max, k_len_max;        /* over the spans; equal only where each span's two ranges are the same */
    const void *q; uint64_t q_ld;
    const void *k; uint64_t k_ld;
    const void *v; uint64_t v_ld;
    void *o; uint64_t o_ld;
    float *lse;                           /* [H, T] */
} fb_attention;

/* dq, dk, dv of fb_attention (q ranges equal k ranges).  scratch: attention_scratch bytes. */
typedef struct fb_attention_bwd {
    fb_attention fwd;
    const void *d_o; uint64_t do_ld;
    void *dq; uint64_t dq_ld;
    void *dk; uint64_t dk_ld;
    void *dv; uint64_t dv_ld;
    void *scratch;
} fb_attention_bwd;

/* y[T,F] = silu(gu[:, :F]) * gu[:, F:],  silu(x) = x / (1 + exp(-x)).  Shazeer 2020, eq. 5 (SwiGLU).
 * As transformers: in bf16 silu's result is rounded before the product. */
typedef struct fb_swiglu {
    fb_dtype act;
    uint32_t t, f;
    const void *gu; /* [T, 2F] */
    void *y;        /* [T, F] */
} fb_swiglu;

/* dgu [T, 2F] from dy [T, F]; dgu may not be gu. */
typedef struct fb_swiglu_bwd {
    fb_dtype act;
    uint32_t t, f;
    const void *gu, *dy;
    void *dgu;
} fb_swiglu_bwd;

/* y[i,:] = x[index[i],:] for i < n. */
typedef struct fb_gather_rows {
    fb_dtype act;
    uint32_t n, c;
    const void *x; const uint32_t *index; void *y;
} fb_gather_rows;

/* y[T,C] = 0, then y[index[i],:] = x[i,:] for i < n; the indices are distinct. */
typedef struct fb_scatter_rows {
    fb_dtype act;
    uint32_t n, t, c;
    const void *x; const uint32_t *index; void *y;
} fb_scatter_rows;

/* d_table[V,C] += rows of dx [T,C] by token id, without atomics: unique id u has rows order[start[u] .. start[u + 1])
 * of dx, summed in that order, then added to the row id[u]. */
typedef struct fb_embed_grad {
    fb_dtype act;
    uint32_t c, n_unique;
    const void *dx;
    const uint32_t *id, *start, *order; /* [n_unique], [n_unique + 1], [T] */
    float *d_table;
} fb_embed_grad;

/* For each row i of logits [N,V] (float32): loss[i] = log(sum exp(logits[i,:])) - logits[i, target[i]];
 * d_logits[i,:] = (softmax(logits[i,:]) - onehot) * grad_scale, of dtype act.  d_logits may be the logits (F32);
 * NULL: only the loss.  loss_sum[0] += sum of loss[i] in row order, in double. */
typedef struct fb_cross_entropy {
    fb_dtype act;
    uint32_t n, v;
    const float *logits;
    const uint32_t *target; /* [N] */
    float grad_scale;
    void *d_logits;         /* [N,V] */
    double *loss_sum;
    float *loss;            /* [N], or NULL */
} fb_cross_entropy;

/* out[i] = acc[i] rounded to out_dtype (out may be acc in F32, or NULL: then nothing is written);
 * sq[0] (+)= sum of out[i]^2 in double over fixed tiles of 64 Ki elements, added in tile order. */
typedef struct fb_grad_out {
    fb_dtype out_dtype;
    uint64_t n;
    const float *acc;
    void *out;
    double *sq;
    bool accumulate;
} fb_grad_out;

/* AdamW over n elements, the bits of optim/adamw.h.  act F32: w is the master.  BF16: w is its high half, low the rest.
 * g of dtype g_dtype: act, or F32, which is rounded to act first, as grad_out does.  guard: NULL, or device memory whose
 * value decides: while it is not finite nothing is written. */
typedef struct fb_update {
    fb_dtype act, g_dtype;
    uint64_t n;
    void *w;
    int16_t *low;
    const void *g;
    float *m, *v;
    fb_adamw_scalars adamw;
    const double *guard;
} fb_update;

/* One line an operation: the table, the cpu back end's wrappers and the fault back end's all walk it. */
#define FB_KERNEL_MAP(X)                                                                                         \
    X(matmul_nt) X(matmul_nn) X(matmul_tn) X(bias_grad) X(rms_norm) X(rms_norm_bwd) X(rope_qk) X(rope_qk_bwd)    \
    X(attention) X(attention_bwd) X(swiglu) X(swiglu_bwd) X(gather_rows) X(scatter_rows) X(embed_grad)           \
    X(cross_entropy) X(grad_out) X(update)

struct fb_kernels {
#define FB_KERNEL_ENTRY(name) fb_status (*name)(fb_device *d, const fb_##name *a, fb_error *err);
    FB_KERNEL_MAP(FB_KERNEL_ENTRY)
#undef FB_KERNEL_ENTRY
    /* Device scratch for attention_bwd at these maxima, bytes. */
    uint64_t (*attention_scratch)(uint32_t t_max, uint32_t n_head, uint32_t head_dim);
};

#endif
