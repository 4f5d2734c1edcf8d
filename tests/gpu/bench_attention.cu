/* bench_attention.cu - rates of attention, own against cuDNN, and of the matrix products of a Qwen2.5-7B layer.
 *
 * One line a shape: TFLOP/s of the median run.  Attention counts what a causal mask leaves, S^2 / 2 a document and head, 4 D
 * operations each forward and 10 D backward, whatever a kernel computes twice.  Both attentions' results are compared too: largest
 * difference, relative to the largest value.
 *
 * Linked with the back end's objects, not through the plug-in: it calls what lies below the table of kernels. */
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "device/cuda/attention_cudnn.h"
#include "device/cuda/attention_own.h"
#include "device/cuda/cuda.h"

extern "C" {
#include "device/plugin.h"
extern const fb_plugin fb_plugin_cuda;
}

static const int RUNS = 7, WARM_RUNS = 2;

static void check(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_attention: %s: %s\n", what, cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

static void *room(uint64_t size)
{
    void *p;
    check(cudaMalloc(&p, size) == cudaSuccess, "device memory");
    check(cudaMemset(p, 0, size) == cudaSuccess, "device memory");
    return p;
}

/* Uniform in [-amplitude, amplitude): SplitMix64 of the index. */
__global__ void random_kernel(__nv_bfloat16 *to, uint64_t n, uint64_t seed, float amplitude)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t z = (i + seed * 0x9e3779b97f4a7c15u) * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        to[i] = __float2bfloat16_rn(((z >> 40) * 0x1p-23f - 1.0f) * amplitude);
    }
}

static __nv_bfloat16 *random_rows(uint64_t n, uint64_t seed, float amplitude)
{
    __nv_bfloat16 *p = (__nv_bfloat16 *)room(n * sizeof *p);
    random_kernel<<<1024, 256>>>(p, n, seed, amplitude);
    check(cudaDeviceSynchronize() == cudaSuccess, "random numbers");
    return p;
}

/* Median seconds; 0 when run says that it cannot. */
template <typename F> static double seconds(cudaStream_t stream, F run)
{
    cudaEvent_t from, to;
    check(cudaEventCreate(&from) == cudaSuccess && cudaEventCreate(&to) == cudaSuccess, "events");
    std::vector<float> ms;
    for (int i = 0; i < WARM_RUNS + RUNS; i++) {
        cudaEventRecord(from, stream);
        if (!run())
            return 0;
        cudaEventRecord(to, stream);
        check(cudaStreamSynchronize(stream) == cudaSuccess, "a run");
        float t = 0;
        cudaEventElapsedTime(&t, from, to);
        if (i >= WARM_RUNS)
            ms.push_back(t);
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e-3;
}

static double rate(double flops, double s)
{
    return s > 0 ? flops / s * 1e-12 : 0;
}

template <typename T> static std::vector<float> fetch(const T *from, uint64_t n)
{
    std::vector<T> raw(n);
    check(cudaMemcpy(raw.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess, "results");
    std::vector<float> v(n);
    for (uint64_t i = 0; i < n; i++)
        v[i] = (float)raw[i];
    return v;
}

static double difference(const std::vector<float> &a, const std::vector<float> &b)
{
    double worst = 0, largest = 0;
    for (size_t i = 0; i < a.size(); i++) {
        double d = std::abs((double)a[i] - b[i]);
        worst = d <= worst ? worst : d; /* a NaN stays */
        largest = std::max(largest, std::abs((double)b[i]));
    }
    return worst / largest;
}

typedef struct results {
    std::vector<float> o, lse, dq, dk, dv;
} results;

static void attention(fb_cuda *c, fb_cudnn *cudnn, const char *name, const std::vector<uint32_t> &len, uint32_t h,
                      uint32_t g, uint32_t d, uint32_t window)
{
    std::vector<fb_span> span;
    uint32_t t = 0, longest = 0;
    double pairs = 0;
    for (uint32_t n : len) {
        span.push_back({ t, n, t, n });
        t += n;
        longest = std::max(longest, n);
        double w = window && window < n ? window : n;
        pairs += n * w - w * w / 2;
    }
    uint64_t q_n = (uint64_t)t * h * d, k_n = (uint64_t)t * g * d, qkv_ld = (uint64_t)(h + 2 * g) * d;
    fb_span *spans = (fb_span *)room(span.size() * sizeof(fb_span));
    check(cudaMemcpy(spans, span.data(), span.size() * sizeof(fb_span), cudaMemcpyHostToDevice) == cudaSuccess, "spans");
    __nv_bfloat16 *q = random_rows(q_n, 1, 3), *k = random_rows(k_n, 2, 3), *qkv = random_rows(t * qkv_ld, 3, 1);
    __nv_bfloat16 *d_o = random_rows(q_n, 4, 1), *o = (__nv_bfloat16 *)room(q_n * 2), *dq = (__nv_bfloat16 *)room(q_n * 2);
    __nv_bfloat16 *dk = (__nv_bfloat16 *)room(k_n * 2), *dqkv = (__nv_bfloat16 *)room(t * qkv_ld * 2);
    float *lse = (float *)room((uint64_t)h * t * 4);
    void *scratch = room(fb_cuda_attention_scratch(t, h, d));
    uint64_t v_at = (uint64_t)(h + g) * d;
    fb_attention a = { FB_BF16, t, h, g, d, window, 1.0f / sqrtf((float)d), spans, (uint32_t)span.size(), longest, longest,
                       q, h * d, k, g * d, qkv + v_at, qkv_ld, o, h * d, lse };
    fb_attention_bwd b = { a, d_o, h * d, dq, h * d, dk, g * d, dqkv + v_at, qkv_ld, scratch };
    cudaStream_t stream = fb_cuda_compute(c);
    double fwd_flops = 4.0 * d * h * pairs, bwd_flops = 2.5 * fwd_flops;

    auto keep = [&] {
        return results{ fetch(o, q_n), fetch(lse, (uint64_t)h * t), fetch(dq, q_n), fetch(dk, k_n), fetch(dqkv, t * qkv_ld) };
    };
    double own_fwd = seconds(stream, [&] { return fb_cuda_attention_bf16(stream, &a) == cudaSuccess; });
    double own_bwd = seconds(stream, [&] {
        return fb_cuda_attention_delta(stream, &b, (float *)scratch) == cudaSuccess
               && fb_cuda_attention_bf16_bwd(stream, &b, (float *)scratch) == cudaSuccess;
    });
    results own = keep();
    double lib_fwd = cudnn ? seconds(stream, [&] {
        return fb_cudnn_forward(cudnn, &a, c->workspace, FB_CUDA_WORKSPACE_SIZE) == FB_CUDNN_DONE;
    }) : 0;
    double lib_bwd = cudnn ? seconds(stream, [&] { return fb_cudnn_backward(cudnn, &b) == FB_CUDNN_DONE; }) : 0;
    printf("%-28s H %u G %u D %u window %u: own %.0f / %.0f, cuDNN %.0f / %.0f TFLOP/s forward / backward", name, h, g, d, window,
           rate(fwd_flops, own_fwd), rate(bwd_flops, own_bwd), rate(fwd_flops, lib_fwd), rate(bwd_flops, lib_bwd));
    if (lib_fwd > 0 && lib_bwd > 0) {
        results lib = keep();
        printf("; they differ by o %.1e lse %.1e dq %.1e dk %.1e dv %.1e\n", difference(own.o, lib.o), difference(own.lse, lib.lse),
               difference(own.dq, lib.dq), difference(own.dk, lib.dk), difference(own.dv, lib.dv));
    } else {
        printf("; cuDNN did not run: %s\n", cudnn ? fb_cudnn_why(cudnn) : "absent");
    }
    for (void *p : { (void *)spans, (void *)q, (void *)k, (void *)qkv, (void *)d_o, (void *)o, (void *)dq, (void *)dk,
                     (void *)dqkv, (void *)lse, scratch })
        cudaFree(p);
}

static void products(fb_cuda *c, const char *name, uint32_t t, uint32_t n, uint32_t k, bool bias, bool add)
{
    __nv_bfloat16 *x = random_rows((uint64_t)t * k, 1, 1), *w = random_rows((uint64_t)n * k, 2, 1);
    __nv_bfloat16 *y = random_rows((uint64_t)t * n, 3, 1), *b = random_rows(n, 4, 1),
        *dx = (__nv_bfloat16 *)room((uint64_t)t * k * 2);
    float *dw = (float *)room((uint64_t)n * k * sizeof(float));
    fb_device *d = &c->device;
    cudaStream_t stream = fb_cuda_compute(c);
    fb_matmul_nt nt = { FB_BF16, FB_BF16, t, n, k, x, k, w, k, bias ? b : NULL, add ? y : NULL, n, y, n };
    fb_matmul_nn nn = { FB_BF16, t, n, k, y, n, w, k, dx, k };
    fb_matmul_tn set = { FB_BF16, t, n, k, y, n, x, k, dw, false }, sum = { FB_BF16, t, n, k, y, n, x, k, dw, true };
    double flops = 2.0 * t * n * k;
    printf("%-8s T %u N %u K %u: nt%s%s %.0f", name, t, n, k, bias ? " + bias" : "", add ? " + add" : "",
           rate(flops, seconds(stream, [&] { return fb_cuda_matmul_nt(d, &nt, NULL) == FB_OK; })));
    random_kernel<<<1024, 256>>>(y, (uint64_t)t * n, 5, 1.0f); /* it was added up many times over */
    check(cudaDeviceSynchronize() == cudaSuccess, "random numbers");
    printf(", nn %.0f", rate(flops, seconds(stream, [&] { return fb_cuda_matmul_nn(d, &nn, NULL) == FB_OK; })));
    printf(", tn %.0f", rate(flops, seconds(stream, [&] { return fb_cuda_matmul_tn(d, &set, NULL) == FB_OK; })));
    printf(", tn + dw %.0f TFLOP/s\n", rate(flops, seconds(stream, [&] { return fb_cuda_matmul_tn(d, &sum, NULL) == FB_OK; })));
    for (void *p : { (void *)x, (void *)w, (void *)y, (void *)b, (void *)dx, (void *)dw })
        cudaFree(p);
}

int main(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    fb_device *d = NULL;
    fb_error err = {};
    fb_device_options options = {};
    options.backend = "cuda";
    if (fb_plugin_cuda.open(&d, &options, &err) != FB_OK) {
        fprintf(stderr, "bench_attention: %s\n", err.msg);
        return 1;
    }
    fb_cuda *c = (fb_cuda *)d;
    char why[FB_CUDNN_WHY_SIZE] = "";
    fb_cudnn *cudnn = fb_cudnn_open(c->cc, fb_cuda_compute(c), why);
    printf("cuDNN %s\n", cudnn ? fb_cudnn_version(cudnn) : why);

    std::vector<uint32_t> packed, short_ones;
    for (uint32_t left = 16384, i = 0; left > 0; i++) {
        uint32_t len = std::min(left, 40 + i * 2654435761u % 1900);
        packed.push_back(len);
        left -= len;
    }
    for (uint32_t i = 0; i < 128; i++)
        short_ones.push_back(100 + i % 57);
    attention(c, cudnn, "16 x 1024", std::vector<uint32_t>(16, 1024), 28, 4, 128, 0);
    attention(c, cudnn, "4 x 4096", std::vector<uint32_t>(4, 4096), 28, 4, 128, 0);
    attention(c, cudnn, "4 x 4096", std::vector<uint32_t>(4, 4096), 28, 4, 128, 1024);
    attention(c, cudnn, "1 x 32768", std::vector<uint32_t>(1, 32768), 28, 4, 128, 0);
    attention(c, cudnn, "16 x 1000 (ragged)", std::vector<uint32_t>(16, 1000), 28, 4, 128, 0);
    attention(c, cudnn, "packed to 16384", packed, 28, 4, 128, 0);
    attention(c, cudnn, "128 short ones", short_ones, 28, 4, 128, 0);
    attention(c, cudnn, "16 x 1024", std::vector<uint32_t>(16, 1024), 9, 3, 64, 0);
    attention(c, cudnn, "8 x 2048", std::vector<uint32_t>(8, 2048), 16, 8, 256, 0);

    products(c, "qkv", 16384, 4608, 3584, true, false);
    products(c, "o", 16384, 3584, 3584, false, true);
    products(c, "gate up", 16384, 37888, 3584, false, false);
    products(c, "down", 16384, 3584, 18944, false, true);
    products(c, "head", 2048, 152064, 3584, false, false);
    fb_cudnn_close(cudnn);
    d->ops->close(d);
    return 0;
}
