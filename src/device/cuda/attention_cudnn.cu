/* attention_cudnn.cu - attention as cuDNN graphs, built once a shape, through its header-only C++ front end.
 *
 * Two kinds of graph.  Even: all documents have the same length, so that the packed tokens are an ordinary (documents, heads,
 * length, head_dim) tensor with strides.  Ragged: documents of any lengths, each at an offset that lies in device memory;
 * the graph fixes only bounds on their number, their length and the tokens together.  Building takes about a second, so the
 * bounds are rounded up to a few steps, and a run meets all of its graphs in its first micro-batches.
 *
 * What cuDNN cannot be trusted with, by version (the front end checks the same): before 9.12 the forward writes lse only
 * as [document][head][token]; before 9.26 the backward of an even graph reads it only so.  Ours is [head][token], so that the
 * backward reads a transposed copy, and so does the ragged graph, whose lse is [token][head] on both sides.  And 9.14's ragged
 * backward puts dv where the offsets of v point, whatever those of dv say: v is packed into the rows that dv has.
 *
 * cuDNN is looked for at run time: a machine without it still has the rest of the back end. */
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cstring> /* the front end uses it, and does not say so */
#include <cudnn_frontend.h>

#include <dlfcn.h>
#include <stdio.h>

#include "device/cuda/attention_cudnn.h"
#include "device/cuda/planned.h"

namespace fe = cudnn_frontend;
typedef std::shared_ptr<fe::graph::Tensor_attributes> tensor;

namespace cudnn_frontend {
void *cudnn_dlhandle; /* the front end's; set by fb_cudnn_open */
}

namespace {

constexpr size_t VERSION_MIN = 91200;
constexpr uint32_t PLAN_MAX = 256, EVEN_STEP = 128, LEN_MIN = 128, ALIGNMENT = 256;
/* A ragged graph starts a block for every tile of every document of the longest's length; most have nothing to do when one
 * document is far longer than the rest.  Beyond so many times the tokens that there are, the own kernels are the better choice. */
constexpr uint64_t PADDING_MAX = 16;

/* Tensors of a graph.  A ragged tensor's offsets have its number plus OFFSET. */
enum : int64_t { Q = 1, K, V, O, STATS, D_O, DQ, DK, DV, TENSOR_COUNT, LEN_Q = TENSOR_COUNT, LEN_K, OFFSET = 32 };

/* What a graph depends on.  No padding: compared as bytes. */
typedef struct shape {
    uint32_t backward, ragged;
    uint32_t n_doc, len, t; /* even: exact; ragged: bounds */
    uint32_t n_head, n_kv_head, head_dim, window;
    float    scale;
    uint64_t ld[TENSOR_COUNT]; /* distance between tokens, elements; 0: not in the graph */
} shape;
static_assert(sizeof(shape) == 10 * sizeof(uint32_t) + TENSOR_COUNT * sizeof(uint64_t), "no padding");

typedef struct plan {
    shape s;
    std::shared_ptr<fe::graph::Graph> graph; /* empty: refused */
    uint64_t workspace_size;
    char why[FB_CUDNN_WHY_SIZE];             /* refused */
} plan;

uint64_t align(uint64_t size)
{
    return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

uint32_t power_of_two(uint32_t n, uint32_t least)
{
    uint32_t p = least;
    while (p < n && p <= UINT32_MAX / 2)
        p *= 2;
    return p < n ? n : p;
}

} // namespace

struct fb_cudnn {
    void         *library;
    cudnnHandle_t handle;
    cudaStream_t  stream;
    int           cc;
    char          version[32];
    char          why[FB_CUDNN_WHY_SIZE];
    uint32_t      n_plan;
    plan          plans[PLAN_MAX];
};

namespace {

void say(char why[FB_CUDNN_WHY_SIZE], const char *text)
{
    snprintf(why, FB_CUDNN_WHY_SIZE, "%s", text);
}

/* ---- graphs ---- */

tensor index_tensor(fe::graph::Graph &g, int64_t uid, int64_t n, fe::DataType_t type)
{
    return g.tensor(fe::graph::Tensor_attributes().set_name("index").set_uid(uid).set_dim({ n, 1, 1, 1 })
                        .set_stride({ 1, 1, 1, 1 }).set_data_type(type));
}

/* Tokens' rows of `heads` heads. */
void rows_layout(fe::graph::Graph &g, fe::graph::Tensor_attributes &x, const shape &s, int64_t uid, int64_t heads)
{
    int64_t d = s.head_dim, ld = (int64_t)s.ld[uid], len = s.len;
    x.set_uid(uid).set_dim({ s.n_doc, heads, len, d }).set_stride({ len * ld, d, ld, 1 })
        .set_data_type(fe::DataType_t::BFLOAT16);
    if (s.ragged)
        x.set_ragged_offset(index_tensor(g, uid + OFFSET, (int64_t)s.n_doc + 1, fe::DataType_t::INT64));
}

tensor rows_input(fe::graph::Graph &g, const shape &s, int64_t uid, int64_t heads, const char *name)
{
    fe::graph::Tensor_attributes x;
    rows_layout(g, x.set_name(name), s, uid, heads);
    return g.tensor(x);
}

void rows_output(fe::graph::Graph &g, const tensor &x, const shape &s, int64_t uid, int64_t heads)
{
    rows_layout(g, x->set_output(true), s, uid, heads);
}

/* lse: even [head][token] forward, [document][head][token] backward; ragged [token][head]. */
void stats_layout(fe::graph::Graph &g, fe::graph::Tensor_attributes &x, const shape &s)
{
    int64_t h = s.n_head, len = s.len, n = s.n_doc;
    x.set_uid(STATS).set_dim({ n, h, len, 1 }).set_data_type(fe::DataType_t::FLOAT);
    if (s.ragged)
        x.set_stride({ len * h, 1, h, 1 })
            .set_ragged_offset(index_tensor(g, STATS + OFFSET, n + 1, fe::DataType_t::INT64));
    else if (s.backward)
        x.set_stride({ h * len, len, 1, 1 });
    else
        x.set_stride({ len, n * len, 1, 1 });
}

/* The parts that both directions' attributes have in common. */
template <typename Attributes> void set_common(fe::graph::Graph &g, Attributes &x, const shape &s)
{
    x.set_attn_scale(s.scale).set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    if (s.window)
        x.set_diagonal_band_left_bound((int)s.window); /* key > query - window */
    if (s.ragged)
        x.set_padding_mask(true).set_seq_len_q(index_tensor(g, LEN_Q, s.n_doc, fe::DataType_t::INT32))
            .set_seq_len_kv(index_tensor(g, LEN_K, s.n_doc, fe::DataType_t::INT32));
}

void describe_forward(fe::graph::Graph &g, const shape &s)
{
    auto x = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
    set_common(g, x, s);
    auto [o, stats] = g.sdpa(rows_input(g, s, Q, s.n_head, "q"), rows_input(g, s, K, s.n_kv_head, "k"),
                             rows_input(g, s, V, s.n_kv_head, "v"), x);
    rows_output(g, o, s, O, s.n_head);
    stats_layout(g, stats->set_output(true), s);
}

void describe_backward(fe::graph::Graph &g, const shape &s)
{
    auto x = fe::graph::SDPA_backward_attributes().set_name("attention_bwd");
    set_common(g, x, s);
    if (s.ragged) /* sizes cuDNN's sums by the tokens that there are, not by documents x longest */
        x.set_max_total_seq_len_q(s.t).set_max_total_seq_len_kv(s.t);
    fe::graph::Tensor_attributes stats;
    stats_layout(g, stats.set_name("lse"), s);
    auto [dq, dk, dv] = g.sdpa_backward(rows_input(g, s, Q, s.n_head, "q"), rows_input(g, s, K, s.n_kv_head, "k"),
                                        rows_input(g, s, V, s.n_kv_head, "v"), rows_input(g, s, O, s.n_head, "o"),
                                        rows_input(g, s, D_O, s.n_head, "do"), g.tensor(stats), x);
    rows_output(g, dq, s, DQ, s.n_head);
    rows_output(g, dk, s, DK, s.n_kv_head);
    rows_output(g, dv, s, DV, s.n_kv_head);
}

void plan_build(fb_cudnn *n, plan *p)
{
    try {
        auto g = std::make_shared<fe::graph::Graph>();
        g->set_io_data_type(fe::DataType_t::BFLOAT16).set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT).set_sm_version(n->cc);
        if (p->s.backward)
            describe_backward(*g, p->s);
        else
            describe_forward(*g, p->s);
        /* The heuristic's first choice, never a timing. */
        fe::error_t e = g->build(n->handle, { fe::HeurMode_t::A });
        if (e.is_bad()) {
            say(p->why, e.get_message().c_str());
            return;
        }
        int64_t size = g->get_workspace_size();
        p->workspace_size = size > 0 ? (uint64_t)size : 0;
        p->graph = g;
    } catch (const std::exception &e) {
        say(p->why, e.what());
    }
}

/* NULL: refused. */
plan *plan_find(fb_cudnn *n, const shape &s)
{
    plan *p = n->plans;
    while (p < n->plans + n->n_plan && memcmp(&p->s, &s, sizeof s) != 0)
        p++;
    if (p == n->plans + n->n_plan) {
        if (n->n_plan == PLAN_MAX) {
            say(n->why, "more shapes than there is room for graphs");
            return NULL;
        }
        p->s = s;
        plan_build(n, p);
        n->n_plan++;
    }
    if (!p->graph) {
        say(n->why, p->why);
        return NULL;
    }
    return p;
}

/* ---- shapes ---- */

bool aligned(const void *p, uint64_t ld)
{
    return (uintptr_t)p % 16 == 0 && ld % 8 == 0;
}

/* NULL, or why not. */
const char *objection(const fb_attention *a)
{
    if (a->head_dim % 8 != 0)
        return "head_dim is no multiple of 8";
    if (!aligned(a->q, a->q_ld) || !aligned(a->k, a->k_ld) || !aligned(a->v, a->v_ld) || !aligned(a->o, a->o_ld))
        return "rows are not aligned to 16 bytes";
    /* kernels.h: only then are the ranges of keys those of the queries. */
    if (a->k_len_max != a->q_len_max)
        return "queries continue cached keys";
    if (a->q_len_max == 1)
        return "all documents have one token";
    return NULL;
}

bool shape_of(shape *s, const fb_attention *a, const fb_attention_bwd *b, char why[FB_CUDNN_WHY_SIZE])
{
    const char *no = objection(a);
    if (!no && b && !(aligned(b->d_o, b->do_ld) && aligned(b->dq, b->dq_ld) && aligned(b->dk, b->dk_ld)
                      && aligned(b->dv, b->dv_ld)))
        no = "rows of gradients are not aligned to 16 bytes";
    uint64_t kv_ld = (uint64_t)a->n_kv_head * a->head_dim;
    bool even = (uint64_t)a->n_span * a->q_len_max == a->t && a->q_len_max % EVEN_STEP == 0;
    memset(s, 0, sizeof *s);
    s->backward = b != NULL;
    s->ragged = !even;
    s->n_doc = even ? a->n_span : power_of_two(a->n_span, 1);
    s->len = even ? a->q_len_max : power_of_two(a->q_len_max, LEN_MIN);
    s->t = even ? a->t : (uint32_t)fb_cuda_token_bound(a->t);
    s->n_head = a->n_head;
    s->n_kv_head = a->n_kv_head;
    s->head_dim = a->head_dim;
    s->window = a->window < a->q_len_max ? a->window : 0; /* a wider one hides nothing */
    s->scale = a->scale;
    s->ld[Q] = a->q_ld;
    s->ld[K] = a->k_ld;
    s->ld[V] = even ? a->v_ld : kv_ld;
    s->ld[O] = a->o_ld;
    if (b) {
        s->ld[D_O] = b->do_ld;
        s->ld[DQ] = b->dq_ld;
        /* A ragged graph sizes its sums over a group's heads by these, so it gets packed rows (stage, below). */
        s->ld[DK] = even ? b->dk_ld : kv_ld;
        s->ld[DV] = even ? b->dv_ld : kv_ld;
        if (!no && !even && b->dq_ld != (uint64_t)a->n_head * a->head_dim)
            no = "rows of dq are not packed";
    }
    if (!no && !even && (uint64_t)s->n_doc * s->len > PADDING_MAX * s->t)
        no = "one document is far longer than the others";
    if (!no && even && s->len > INT32_MAX)
        no = "a document is too long";
    if (no)
        say(why, no);
    return no == NULL;
}

/* ---- indices, copies ---- */

typedef struct index_args {
    const fb_span *span;
    uint32_t n_span, n_doc, t;
    int32_t *len;                        /* [n_doc] */
    int64_t *offset[TENSOR_COUNT];       /* [n_doc + 1], or NULL */
    uint64_t ld[TENSOR_COUNT];
} index_args;

/* Documents beyond the real ones are empty and lie behind the last token. */
__global__ void index_kernel(index_args f)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > f.n_doc)
        return;
    fb_span s = i < f.n_span ? f.span[i] : fb_span{ f.t, 0, f.t, 0 };
    if (i < f.n_doc)
        f.len[i] = (int32_t)s.q_len;
    for (int x = 0; x < TENSOR_COUNT; x++)
        if (f.offset[x])
            f.offset[x][i] = (int64_t)(s.q_start * f.ld[x]);
}

typedef struct permute_args {
    float *to;
    const float *from;
    uint64_t n;         /* elements */
    uint32_t rows, cols;
    uint64_t batch_step, row_step, col_step;
} permute_args;

/* to[batch][row][col], contiguous, from what lies at the given distances. */
__global__ void permute_kernel(permute_args f)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < f.n)
        f.to[i] = f.from[i / f.cols / f.rows * f.batch_step + i / f.cols % f.rows * f.row_step + i % f.cols * f.col_step];
}

/* Rows of `width` 16-byte pieces, n pieces together, at a distance of ld pieces each. */
__global__ void rows_kernel(uint4 *to, uint64_t to_ld, const uint4 *from, uint64_t from_ld, uint64_t n, uint32_t width)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i / width * to_ld + i % width] = from[i / width * from_ld + i % width];
}

constexpr uint32_t THREADS = 256;

uint32_t blocks(uint64_t n)
{
    return (uint32_t)((n + THREADS - 1) / THREADS);
}

void permute(fb_cudnn *n, const permute_args &f)
{
    permute_kernel<<<blocks(f.n), THREADS, 0, n->stream>>>(f);
}

/* Rows of bfloat16 elements, their number and distances multiples of 8. */
void copy_rows(fb_cudnn *n, uint32_t t, uint64_t width, void *to, uint64_t to_ld, const void *from, uint64_t from_ld)
{
    uint64_t count = t * (width / 8);
    rows_kernel<<<blocks(count), THREADS, 0, n->stream>>>((uint4 *)to, to_ld / 8, (const uint4 *)from, from_ld / 8, count,
                                                          (uint32_t)(width / 8));
}

/* Cuts pieces off a buffer. */
typedef struct cutter {
    unsigned char *at;
    uint64_t left;
    bool     ok;
} cutter;

cutter cutter_of(void *base, uint64_t size)
{
    uint64_t skip = -(uintptr_t)base % ALIGNMENT;
    return { (unsigned char *)base + skip, size > skip ? size - skip : 0, true };
}

void *cut(cutter *c, uint64_t size)
{
    size = align(size);
    if (size > c->left) {
        c->ok = false;
        return NULL;
    }
    void *p = c->at;
    c->at += size;
    c->left -= size;
    return p;
}

typedef std::unordered_map<int64_t, void *> binding;

/* The index tensors of a ragged graph: cut, filled on the stream, bound. */
index_args index_cut(cutter *c, const plan *p, const fb_attention *a, binding &bind)
{
    const shape &s = p->s;
    index_args f = { a->span, a->n_span, s.n_doc, a->t, (int32_t *)cut(c, s.n_doc * sizeof(int32_t)), {}, {} };
    bind[LEN_Q] = bind[LEN_K] = f.len;
    for (int x = Q; x < TENSOR_COUNT; x++) {
        f.ld[x] = x == STATS ? s.n_head : s.ld[x];
        if (f.ld[x] == 0)
            continue;
        f.offset[x] = (int64_t *)cut(c, ((uint64_t)s.n_doc + 1) * sizeof(int64_t));
        bind[x + OFFSET] = f.offset[x];
    }
    return f;
}

fb_cudnn_result launched(fb_cudnn *n)
{
    cudaError_t e = cudaGetLastError();
    if (e == cudaSuccess)
        return FB_CUDNN_DONE;
    say(n->why, cudaGetErrorString(e));
    return FB_CUDNN_FAILED;
}

fb_cudnn_result run(fb_cudnn *n, plan *p, binding &bind, void *workspace)
{
    try {
        fe::error_t e = p->graph->execute(n->handle, bind, workspace);
        if (e.is_good())
            return launched(n);
        say(n->why, e.get_message().c_str());
    } catch (const std::exception &e) {
        say(n->why, e.what());
    }
    return FB_CUDNN_FAILED;
}

fb_cudnn_result no_room(fb_cudnn *n, uint64_t size)
{
    snprintf(n->why, sizeof n->why, "its graph wants %llu MiB of scratch, more than there is",
             (unsigned long long)(size >> 20));
    return FB_CUDNN_REFUSED;
}

fb_cudnn_result forward(fb_cudnn *n, const fb_attention *a, cutter c)
{
    shape s;
    plan *p = shape_of(&s, a, NULL, n->why) ? plan_find(n, s) : NULL;
    if (!p)
        return FB_CUDNN_REFUSED;
    binding bind = { { Q, (void *)a->q }, { K, (void *)a->k }, { V, (void *)a->v }, { O, a->o }, { STATS, a->lse } };
    uint64_t lse_size = (uint64_t)a->t * a->n_head * sizeof(float);
    index_args f = {};
    if (s.ragged) {
        f = index_cut(&c, p, a, bind);
        bind[STATS] = cut(&c, lse_size);
        bind[V] = cut(&c, a->t * s.ld[V] * sizeof(uint16_t));
    }
    void *workspace = cut(&c, p->workspace_size);
    if (!c.ok)
        return no_room(n, p->workspace_size);
    if (!s.ragged)
        return run(n, p, bind, workspace);
    copy_rows(n, a->t, s.ld[V], bind[V], s.ld[V], a->v, a->v_ld);
    index_kernel<<<blocks((uint64_t)s.n_doc + 1), THREADS, 0, n->stream>>>(f);
    fb_cudnn_result r = run(n, p, bind, workspace);
    if (r != FB_CUDNN_DONE)
        return r;
    /* [token][head] -> [head][token] */
    permute(n, { a->lse, (const float *)bind[STATS], (uint64_t)a->t * a->n_head, a->n_head, a->t, 0, 1, a->n_head });
    return launched(n);
}

/* A packed place for rows that the caller wants at a distance, in a ragged graph. */
void *stage(cutter *c, const shape &s, uint32_t t, uint64_t packed_ld, uint64_t ld, void *to)
{
    return !s.ragged || ld == packed_ld ? to : cut(c, t * packed_ld * sizeof(uint16_t));
}

void unstage(fb_cudnn *n, uint32_t t, uint64_t packed_ld, uint64_t ld, void *to, const void *from)
{
    if (from != to)
        copy_rows(n, t, packed_ld, to, ld, from, packed_ld);
}

fb_cudnn_result backward(fb_cudnn *n, const fb_attention_bwd *b, cutter c)
{
    const fb_attention *a = &b->fwd;
    shape s;
    plan *p = shape_of(&s, a, b, n->why) ? plan_find(n, s) : NULL;
    if (!p)
        return FB_CUDNN_REFUSED;
    uint64_t kv_ld = (uint64_t)a->n_kv_head * a->head_dim;
    binding bind = { { Q, (void *)a->q }, { K, (void *)a->k }, { V, (void *)a->v }, { O, a->o }, { D_O, (void *)b->d_o },
                     { DQ, b->dq } };
    bind[DK] = stage(&c, s, a->t, kv_ld, b->dk_ld, b->dk);
    bind[DV] = stage(&c, s, a->t, kv_ld, b->dv_ld, b->dv);
    float *lse = (float *)cut(&c, (uint64_t)a->t * a->n_head * sizeof(float));
    bind[STATS] = lse;
    index_args f = {};
    if (s.ragged) {
        f = index_cut(&c, p, a, bind);
        bind[V] = cut(&c, a->t * kv_ld * sizeof(uint16_t));
    }
    void *workspace = cut(&c, p->workspace_size);
    if (!c.ok)
        return no_room(n, p->workspace_size);
    if (s.ragged) {
        copy_rows(n, a->t, kv_ld, bind[V], kv_ld, a->v, a->v_ld);
        index_kernel<<<blocks((uint64_t)s.n_doc + 1), THREADS, 0, n->stream>>>(f);
        permute(n, { lse, a->lse, (uint64_t)a->t * a->n_head, a->t, a->n_head, 0, 1, a->t }); /* -> [token][head] */
    } else { /* -> [document][head][token] */
        permute(n, { lse, a->lse, (uint64_t)a->t * a->n_head, a->n_head, s.len, s.len, a->t, 1 });
    }
    fb_cudnn_result r = run(n, p, bind, workspace);
    if (r != FB_CUDNN_DONE)
        return r;
    unstage(n, a->t, kv_ld, b->dk_ld, b->dk, bind[DK]);
    unstage(n, a->t, kv_ld, b->dv_ld, b->dv, bind[DV]);
    return launched(n);
}

} // namespace

uint64_t fb_cudnn_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    return fb_cuda_planned_attention(t_max, n_head, head_dim);
}

fb_cudnn_result fb_cudnn_forward(fb_cudnn *n, const fb_attention *a, void *workspace, uint64_t workspace_size)
{
    return forward(n, a, cutter_of(workspace, workspace_size));
}

fb_cudnn_result fb_cudnn_backward(fb_cudnn *n, const fb_attention_bwd *b)
{
    uint64_t size = fb_cudnn_scratch(b->fwd.t, b->fwd.n_head, b->fwd.head_dim);
    return backward(n, b, cutter_of(b->scratch, size));
}

const char *fb_cudnn_version(const fb_cudnn *n)
{
    return n->version;
}

const char *fb_cudnn_why(const fb_cudnn *n)
{
    return n->why;
}

fb_cudnn *fb_cudnn_open(int cc, cudaStream_t stream, char why[FB_CUDNN_WHY_SIZE])
{
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        snprintf(why, FB_CUDNN_WHY_SIZE, "cuDNN 9 cannot be loaded: %s", reason ? reason : "no reason given");
        return NULL;
    }
    fb_cudnn *n = new (std::nothrow) fb_cudnn();
    if (!n) {
        dlclose(library);
        say(why, "no host memory for cuDNN's graphs");
        return NULL;
    }
    n->library = cudnn_frontend::cudnn_dlhandle = library;
    n->stream = stream;
    n->cc = cc;
    try {
        size_t version = fe::detail::get_backend_version();
        snprintf(n->version, sizeof n->version, "%zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
        if (version < VERSION_MIN) {
            snprintf(why, FB_CUDNN_WHY_SIZE, "cuDNN %s is installed, 9.12 or later is needed", n->version);
            fb_cudnn_close(n);
            return NULL;
        }
        cudnnStatus_t status = fe::detail::create_handle(&n->handle);
        if (status == CUDNN_STATUS_SUCCESS)
            status = fe::detail::set_stream(n->handle, stream);
        if (status == CUDNN_STATUS_SUCCESS)
            return n;
        snprintf(why, FB_CUDNN_WHY_SIZE, "cuDNN %s does not start: %s", n->version, fe::detail::get_error_string(status));
    } catch (const std::exception &e) {
        snprintf(why, FB_CUDNN_WHY_SIZE, "cuDNN does not start: %s", e.what());
    }
    fb_cudnn_close(n);
    return NULL;
}

void fb_cudnn_close(fb_cudnn *n)
{
    if (!n)
        return;
    for (uint32_t i = 0; i < n->n_plan; i++)
        n->plans[i].graph.reset();
    if (n->handle)
        fe::detail::destroy_handle(n->handle);
    /* The library stays loaded: the front end keeps addresses of its functions for good. */
    delete n;
}
