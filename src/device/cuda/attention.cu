/* attention.cu - attention: cuDNN where it takes the shape, else our own kernels.
 *
 * The choice follows from the shapes, the flag `deterministic` and what the machine has, never from timing.  lse is the same for
 * both ([H, T], kernels.h), so that either backward can follow either forward. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/cuda/attention_cudnn.h"
#include "device/cuda/attention_own.h"
#include "device/cuda/cuda.h"

enum { HEAD_DIM_MAX = 256, WARM_TOKENS = 16 };

struct fb_cuda_attention_state {
    fb_cudnn *cudnn;                   /* NULL: none to use */
    char      why[FB_CUDNN_WHY_SIZE];  /* none, or why it did not run when it last did not */
    uint64_t  n_cudnn[2], n_own[2];    /* runs: forward, backward */
};

static fb_status shape_check(const fb_attention *a, fb_error *err)
{
    assert(a->act == FB_F32 || a->act == FB_BF16);
    assert(a->n_kv_head > 0 && a->n_head % a->n_kv_head == 0);
    assert(a->scale > 0.0f); /* the maximum of the scores is the maximum of the products */
    if (a->head_dim == 0 || a->head_dim > HEAD_DIM_MAX || a->head_dim % 2 != 0)
        return fb_fail(err, FB_INPUT, "cuda: the model's head_dim is %u; attention on a GPU takes even sizes up to %d",
                       a->head_dim, HEAD_DIM_MAX);
    return FB_OK;
}

/* Whether to ask cuDNN at all. */
static bool cudnn_wanted(const fb_cuda *c, const fb_attention *a, bool backward)
{
    fb_cuda_attention_state *s = c->attention;
    if (a->act != FB_BF16 || !s->cudnn)
        return false;
    if (!backward || !c->deterministic)
        return true;
    snprintf(s->why, sizeof s->why, "full_determinism");
    return false;
}

/* FB_OK and *done false: refused, the own kernels' turn. */
static fb_status cudnn_result(fb_cuda *c, fb_cudnn_result r, bool backward, bool *done, const char *what, fb_error *err)
{
    fb_cuda_attention_state *s = c->attention;
    *done = r == FB_CUDNN_DONE;
    if (r == FB_CUDNN_FAILED)
        return fb_cuda_fail_text(c, fb_cudnn_why(s->cudnn), what, err);
    if (r == FB_CUDNN_DONE)
        s->n_cudnn[backward]++;
    else
        snprintf(s->why, sizeof s->why, "%s", fb_cudnn_why(s->cudnn));
    return FB_OK;
}

fb_status fb_cuda_attention(fb_device *d, const fb_attention *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    FB_CUDA_OK(shape_check(a, err));
    if (a->t == 0 || a->n_span == 0)
        return FB_OK;
    if (cudnn_wanted(c, a, false)) {
        bool done;
        fb_cudnn_result r = fb_cudnn_forward(c->attention->cudnn, a, c->workspace, FB_CUDA_WORKSPACE_SIZE);
        FB_CUDA_OK(cudnn_result(c, r, false, &done, "attention", err));
        if (done)
            return FB_OK;
    }
    c->attention->n_own[false]++;
    cudaStream_t stream = fb_cuda_compute(c);
    FB_CUDA_TRY(c, a->act == FB_F32 ? fb_cuda_attention_f32(stream, a) : fb_cuda_attention_bf16(stream, a), "attention",
                err);
    return FB_OK;
}

static uint64_t delta_size(uint32_t t, uint32_t n_head)
{
    return (uint64_t)t * n_head * sizeof(float);
}

fb_status fb_cuda_attention_bwd(fb_device *d, const fb_attention_bwd *b, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    const fb_attention *a = &b->fwd;
    FB_CUDA_OK(shape_check(a, err));
    if (a->t == 0 || a->n_span == 0)
        return FB_OK;
    if (cudnn_wanted(c, a, true)) {
        bool done;
        FB_CUDA_OK(cudnn_result(c, fb_cudnn_backward(c->attention->cudnn, b), true, &done, "attention_bwd", err));
        if (done)
            return FB_OK;
    }
    c->attention->n_own[true]++;
    cudaStream_t stream = fb_cuda_compute(c);
    float *delta = (float *)b->scratch;
    FB_CUDA_TRY(c, fb_cuda_attention_delta(stream, b, delta), "attention_bwd", err);
    FB_CUDA_TRY(c, a->act == FB_F32 ? fb_cuda_attention_f32_bwd(stream, b, delta)
                                    : fb_cuda_attention_bf16_bwd(stream, b, delta), "attention_bwd", err);
    return FB_OK;
}

/* Neither the dtype nor whether there is a cuDNN is known here: the most of all cases. */
uint64_t fb_cuda_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    uint64_t own = delta_size(t_max, n_head), cudnn = fb_cudnn_scratch(t_max, n_head, head_dim);
    return own > cudnn ? own : cudnn;
}

static const char *who(const fb_cuda_attention_state *s, bool backward)
{
    return s->n_cudnn[backward] == 0 ? "own" : s->n_own[backward] == 0 ? "cuDNN" : "cuDNN and own";
}

void fb_cuda_attention_describe(const fb_cuda *c, char *text, size_t size)
{
    const fb_cuda_attention_state *s = c->attention;
    bool cudnn = s->cudnn != NULL, own = s->n_own[false] > 0 || s->n_own[true] > 0;
    snprintf(text, size, "%s forward, %s backward%s%s%s%s%s", who(s, false), who(s, true), cudnn ? "; cuDNN " : "",
             cudnn ? fb_cudnn_version(s->cudnn) : "", own && s->why[0] ? " (own: " : "", own ? s->why : "",
             own && s->why[0] ? ")" : "");
}

/* ---- opening ---- */

/* Every own kernel once, on one document of a few tokens that lies in the workspace: at its first run a kernel's code is
 * loaded, and memory is set aside for what its registers do not hold, on every multiprocessor. */
static cudaError_t warm_own(fb_cuda *c)
{
    const fb_span span = { 0, WARM_TOKENS, 0, WARM_TOKENS };
    cudaStream_t stream = fb_cuda_compute(c);
    unsigned char *at = (unsigned char *)c->workspace;
    const uint64_t rows_size = WARM_TOKENS * HEAD_DIM_MAX * sizeof(float);
    cudaError_t e = cudaMemcpyAsync(at, &span, sizeof span, cudaMemcpyHostToDevice, stream);
    if (e == cudaSuccess)
        e = cudaMemsetAsync(at + 256, 0, 10 * rows_size, stream);
    for (uint32_t head_dim = 64; e == cudaSuccess && head_dim <= HEAD_DIM_MAX; head_dim += 64)
        for (int wide = 0; e == cudaSuccess && wide < 2; wide++) {
            unsigned char *rows = at + 256;
            fb_attention a = { wide ? FB_F32 : FB_BF16, WARM_TOKENS, 1, 1, head_dim, 0, 1.0f, (fb_span *)at, 1, WARM_TOKENS,
                               WARM_TOKENS, rows, head_dim, rows + rows_size, head_dim, rows + 2 * rows_size, head_dim,
                               rows + 3 * rows_size, head_dim, (float *)(rows + 8 * rows_size) };
            fb_attention_bwd b = { a, rows + 4 * rows_size, head_dim, rows + 5 * rows_size, head_dim, rows + 6 * rows_size,
                                   head_dim, rows + 7 * rows_size, head_dim, rows + 9 * rows_size };
            e = wide ? fb_cuda_attention_f32(stream, &a) : fb_cuda_attention_bf16(stream, &a);
            if (e == cudaSuccess)
                e = fb_cuda_attention_delta(stream, &b, (float *)b.scratch);
            if (e == cudaSuccess)
                e = wide ? fb_cuda_attention_f32_bwd(stream, &b, (float *)b.scratch)
                         : fb_cuda_attention_bf16_bwd(stream, &b, (float *)b.scratch);
        }
    cudaError_t end = cudaStreamSynchronize(stream);
    return e == cudaSuccess ? end : e;
}

fb_status fb_cuda_attention_init(fb_cuda *c, fb_error *err)
{
    c->attention = (fb_cuda_attention_state *)calloc(1, sizeof *c->attention);
    if (!c->attention)
        return fb_fail(err, FB_NOMEM, "cuda: no host memory for attention's state, %zu bytes", sizeof *c->attention);
    cudaError_t e = warm_own(c);
    if (e != cudaSuccess) {
        fb_cuda_attention_deinit(c);
        return fb_cuda_fail(c, e, "the first attention", err);
    }
    c->attention->cudnn = fb_cudnn_open(c->cc, fb_cuda_compute(c), c->attention->why);
    return FB_OK;
}

void fb_cuda_attention_deinit(fb_cuda *c)
{
    if (!c->attention)
        return;
    fb_cudnn_close(c->attention->cudnn);
    free(c->attention);
    c->attention = NULL;
}
