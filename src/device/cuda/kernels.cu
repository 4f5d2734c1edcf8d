/* kernels.cu - the CUDA device's table, and its warming. */
#include "device/cuda/cuda.h"

#define TABLE_ENTRY(name) fb_cuda_##name,
const fb_kernels fb_cuda_kernels = { FB_KERNEL_MAP(TABLE_ENTRY) fb_cuda_attention_scratch };

enum { WARM_TOKENS = 2, WARM_WIDTH = 256, WARM_HEAD_DIM = 64 };

/* Each of our own kernels once, on zeros, so that its code is on the device before memory is measured and nothing is
 * loaded inside a step.  Operands lie in the workspace's second half; partial sums of so few rows stay in the first. */
static fb_status warm(fb_device *d, fb_dtype act, fb_error *err)
{
    unsigned char *at = (unsigned char *)((fb_cuda *)d)->workspace + FB_CUDA_WORKSPACE_SIZE / 2;
    enum { STEP = WARM_TOKENS * 2 * WARM_WIDTH * sizeof(float) };
    void *x = at, *y = at + STEP, *z = at + 2 * STEP, *w = at + 3 * STEP;
    float *f32 = (float *)(void *)(at + 4 * STEP), *sums = (float *)(void *)(at + 5 * STEP);
    uint32_t *index = (uint32_t *)(void *)(at + 6 * STEP); /* 0, 1, 2: rows, and where the runs of one row start */
    const uint32_t t = WARM_TOKENS, c = WARM_WIDTH;

    fb_rms_norm norm = { act, t, c, 1e-6f, x, w, y, f32 };
    FB_CUDA_OK(fb_cuda_rms_norm(d, &norm, err));
    fb_rms_norm_bwd norm_bwd = { act, t, c, x, w, y, f32, z, z, sums, true };
    FB_CUDA_OK(fb_cuda_rms_norm_bwd(d, &norm_bwd, err));
    norm_bwd.add = NULL;
    FB_CUDA_OK(fb_cuda_rms_norm_bwd(d, &norm_bwd, err));
    for (int with_norm = 0; with_norm < 2; with_norm++) {
        const void *weight = with_norm ? w : NULL;
        fb_rope_qk rope = { act, t, 2, 1, WARM_HEAD_DIM, 1e-6f, x, weight, weight, index, f32, f32, y, z };
        fb_rope_qk_bwd rope_bwd = { rope, y, z, x, sums, sums + WARM_HEAD_DIM, true };
        FB_CUDA_OK(fb_cuda_rope_qk(d, &rope, err));
        FB_CUDA_OK(fb_cuda_rope_qk_bwd(d, &rope_bwd, err));
    }
    fb_swiglu swiglu = { act, t, c, x, y };
    FB_CUDA_OK(fb_cuda_swiglu(d, &swiglu, err));
    fb_swiglu_bwd swiglu_bwd = { act, t, c, x, y, z };
    FB_CUDA_OK(fb_cuda_swiglu_bwd(d, &swiglu_bwd, err));
    fb_gather_rows gather = { act, t, c, x, index, y };
    FB_CUDA_OK(fb_cuda_gather_rows(d, &gather, err));
    fb_scatter_rows scatter = { act, t, t, c, x, index, y };
    FB_CUDA_OK(fb_cuda_scatter_rows(d, &scatter, err));
    fb_embed_grad embed = { act, c, t, x, index, index, index, f32 };
    FB_CUDA_OK(fb_cuda_embed_grad(d, &embed, err));
    fb_cross_entropy loss = { act, t, c, f32, index, 1.0f, y, (double *)(void *)sums, NULL };
    FB_CUDA_OK(fb_cuda_cross_entropy(d, &loss, err));
    fb_bias_grad bias = { act, t, c, x, c, sums, true };
    FB_CUDA_OK(fb_cuda_bias_grad(d, &bias, err));
    fb_grad_out grad = { act, c, f32, y, (double *)(void *)sums, false };
    FB_CUDA_OK(fb_cuda_grad_out(d, &grad, err));
    fb_update update = { act, act, c, x, (int16_t *)y, w, f32, f32, {}, NULL };
    FB_CUDA_OK(fb_cuda_update(d, &update, err));
    update.g_dtype = FB_F32;
    return fb_cuda_update(d, &update, err);
}

fb_status fb_cuda_kernels_init(fb_cuda *c, fb_error *err)
{
    static const uint32_t index[WARM_TOKENS + 1] = { 0, 1, 2 };
    unsigned char *at = (unsigned char *)c->workspace + FB_CUDA_WORKSPACE_SIZE / 2
                        + 6 * (WARM_TOKENS * 2 * WARM_WIDTH * sizeof(float));
    FB_CUDA_TRY(c, cudaMemsetAsync(c->workspace, 0, FB_CUDA_WORKSPACE_SIZE, fb_cuda_compute(c)), "warm-up", err);
    FB_CUDA_TRY(c, cudaMemcpyAsync(at, index, sizeof index, cudaMemcpyHostToDevice, fb_cuda_compute(c)), "warm-up", err);
    FB_CUDA_OK(warm(&c->device, FB_F32, err));
    FB_CUDA_OK(warm(&c->device, FB_BF16, err));
    FB_CUDA_TRY(c, cudaStreamSynchronize(fb_cuda_compute(c)), "warm-up", err);
    return FB_OK;
}
