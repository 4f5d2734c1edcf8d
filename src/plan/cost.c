#include "plan/cost.h"

/* A rate that is not known costs nothing. */
static double over(double amount, double rate)
{
    return rate > 0 ? amount / rate : 0;
}

static double max(double a, double b)
{
    return a > b ? a : b;
}

static double min(double a, double b)
{
    return a < b ? a : b;
}

/* ---- kernels ---- */

/* What passes over memory once. */
static double row_kernel(const fb_machine *m, double bytes)
{
    return max(m->launch, over(bytes, m->memory_rate));
}

/* rows x columns of out from sums over `depth`; moved: bytes, which bind when the product is thin. */
static double product(const fb_machine *m, double rows, double columns, double depth, double moved)
{
    double least = min(rows, min(columns, depth)), rate = m->matmul_peak * fb_curve_at(&m->matmul_rows, least);
    return max(m->launch, max(over(2 * rows * columns * depth, rate), over(moved, m->memory_rate)));
}

typedef struct shape {
    const fb_machine *m;
    const fb_model_config *c;
    double t, hidden, q, kv, qkv, ffn, act; /* act: bytes of an element */
    double pairs; /* of query and key that a head sees */
} shape;

static shape shape_of(const fb_plan_request *r, const fb_machine *m, double rows, double doc_len, double window)
{
    const fb_model_config *c = &r->manifest->cfg;
    shape s = { .m = m, .c = c, .t = rows * r->row_len, .hidden = c->hidden, .q = (double)c->n_head * c->head_dim,
                .kv = (double)c->n_kv_head * c->head_dim, .ffn = c->ffn_dim, .act = (double)fb_dtype_size(r->act) };
    double w = window > 0 && window < doc_len ? window : doc_len;
    s.qkv = s.q + 2 * s.kv;
    s.pairs = s.t * (w - w * w / (2 * doc_len));
    return s;
}

/* y[T,n] = x[T,k] w^T, y of out_size bytes an element */
static double product_nt(const shape *s, double t, double n, double k, double out_size)
{
    return product(s->m, t, n, k, s->act * (t * k + n * k) + out_size * t * n);
}

/* Bytes/s at which the fp32 sum of a weight's gradient is read and written, which costs a micro-batch this much beside the product:
 * what the profile's share comes to at the side of its products.  In whole steps it costs more than on its own, as power goes
 * into it: those of a 7B on an H200 with 4, 12 and 16 rows of 1024 tokens a micro-batch differ as if at 0.7 of that rate. */
static double sum_rate(const fb_machine *m)
{
    const double side = 8192, whole = 0.7;
    double lost = 1 / m->matmul_accumulate - 1, alone = over(2 * side * side * side, m->matmul_peak);
    double rate = over(8 * side * side, lost * alone);
    return whole * (rate > 0 && m->memory_rate > 0 ? min(rate, m->memory_rate) : max(rate, m->memory_rate));
}

/* dx[T,k] = dy[T,n] w, and dw[n,k] += dy^T x in fp32, which is read and written */
static double product_bwd(const shape *s, double t, double n, double k)
{
    return product(s->m, t, k, n, s->act * (t * n + n * k + t * k))
           + product(s->m, n, k, t, s->act * (t * n + t * k)) + over(8 * n * k, sum_rate(s->m));
}

/* The operation that makes a value in the forward; 0 for what another makes too. */
static double making(const shape *s, fb_value v, double doc_len)
{
    switch (v) {
    case FB_V_N1:
    case FB_V_N2:  return row_kernel(s->m, s->t * (2 * s->hidden * s->act + 4));
    case FB_V_QKV: return product_nt(s, s->t, s->qkv, s->hidden, s->act);
    case FB_V_Q:   return row_kernel(s->m, s->t * 2 * (s->q + s->kv) * s->act);
    case FB_V_O:   return max(s->m->launch, over(4 * s->q * s->pairs, fb_curve_at(&s->m->attention_fwd, doc_len)));
    case FB_V_H:   return product_nt(s, s->t, s->hidden, s->q, s->act);
    case FB_V_GU:  return product_nt(s, s->t, 2 * s->ffn, s->hidden, s->act);
    case FB_V_ACT: return row_kernel(s->m, s->t * 3 * s->ffn * s->act);
    case FB_V_X: case FB_V_RSTD1: case FB_V_K: case FB_V_LSE: case FB_V_RSTD2: case FB_V_COUNT: break;
    }
    return 0;
}

static double bias_bwd(const shape *s, bool there, double n)
{
    return there ? row_kernel(s->m, s->t * n * s->act) : 0;
}

static double norm_bwd(const shape *s, double t)
{
    return row_kernel(s->m, t * (4 * s->hidden * s->act + 4));
}

static double layer_forward(const shape *s, double doc_len)
{
    double sum = product_nt(s, s->t, s->hidden, s->ffn, s->act);
    for (fb_value v = FB_V_N1; v < FB_V_COUNT; v++)
        sum += making(s, v, doc_len);
    return sum;
}

static double layer_backward(const shape *s, fb_recompute policy, double doc_len)
{
    const fb_model_config *c = s->c;
    double sum = 0;
    for (fb_value v = FB_V_N1; v < FB_V_COUNT; v++)
        sum += fb_value_kept(v, policy) ? 0 : making(s, v, doc_len);
    sum += product_bwd(s, s->t, s->hidden, s->ffn) + bias_bwd(s, c->mlp_bias, s->hidden);
    sum += row_kernel(s->m, s->t * 5 * s->ffn * s->act); /* swiglu_bwd */
    sum += product_bwd(s, s->t, 2 * s->ffn, s->hidden) + bias_bwd(s, c->mlp_bias, 2 * s->ffn);
    sum += norm_bwd(s, s->t);
    sum += product_bwd(s, s->t, s->hidden, s->q) + bias_bwd(s, c->o_bias, s->hidden);
    /* five products where the forward has two */
    sum += max(s->m->launch, over(2.5 * 4 * s->q * s->pairs, fb_curve_at(&s->m->attention_bwd, doc_len)));
    sum += row_kernel(s->m, s->t * (c->qk_norm ? 3 : 2) * (s->q + s->kv) * s->act);
    sum += product_bwd(s, s->t, s->qkv, s->hidden) + bias_bwd(s, c->qkv_bias, s->qkv);
    return sum + norm_bwd(s, s->t);
}

/* All positions are taken to be learned. */
static double head(const shape *s, double loss_rows, bool train)
{
    double v = s->c->vocab, sum = row_kernel(s->m, 2 * s->t * s->hidden * s->act) * 2; /* gathered, normed */
    for (double first = 0; first < s->t; first += loss_rows) {
        double n = min(loss_rows, s->t - first);
        sum += product_nt(s, n, v, s->hidden, 4) + row_kernel(s->m, n * v * (4 + 4 + (train ? s->act : 0)));
        if (train)
            sum += product_bwd(s, n, v, s->hidden);
    }
    return train ? sum + norm_bwd(s, s->t) + row_kernel(s->m, 2 * s->t * s->hidden * s->act) : sum;
}

static fb_micro_costs micro_costs(const fb_plan_request *r, const fb_machine *m, double rows, double doc_len, double loss_rows)
{
    fb_micro_costs out = { 0 };
    for (int window = 0; window < 2; window++) {
        shape s = shape_of(r, m, rows, doc_len, window ? r->manifest->cfg.sliding_window : 0);
        out.forward[window] = layer_forward(&s, doc_len);
        for (int p = 0; r->train && p < FB_RECOMPUTE_COUNT; p++)
            out.backward[window][p] = layer_backward(&s, (fb_recompute)p, doc_len);
    }
    shape s = shape_of(r, m, rows, doc_len, 0);
    out.head = head(&s, loss_rows, r->train);
    out.rows_size = (uint64_t)(s.t * s.hidden * s.act);
    out.gather = over((double)out.rows_size, m->gather);
    out.look_up = row_kernel(m, 2 * (double)out.rows_size);
    out.embed_grad = row_kernel(m, s.t * s.hidden * (s.act + 8));
    return out;
}

fb_costs fb_costs_of(const fb_plan_request *r, const fb_machine *m, const fb_load *load)
{
    fb_plan p; /* for the cut of the head alone */
    fb_plan_lay_out(&p, r, &(fb_layout){ .n_pass = 1, .slots = 1, .recompute = FB_RECOMPUTE_FULL, .rich = FB_RECOMPUTE_FULL });
    double doc_len = load->doc_len && load->doc_len < r->row_len ? load->doc_len : r->row_len;
    uint64_t before = (uint64_t)(r->n_micro - 1) * r->micro_rows;
    uint32_t last = load->rows_per_step > before ? (uint32_t)(load->rows_per_step - before) : r->micro_rows;
    double large = 1u << 30, threads = load->update_threads ? load->update_threads : m->cores;
    fb_costs c = { .machine = m, .n_micro = r->n_micro, .no_overlap = load->no_overlap };
    c.whole = micro_costs(r, m, r->micro_rows, doc_len, p.loss_rows);
    c.last = last == r->micro_rows ? c.whole : micro_costs(r, m, last, doc_len, p.loss_rows);
    c.element = r->act == FB_BF16 ? 2 * (2 + 2 + 4 + 4) + 2 : 2 * (4 + 4 + 4) + 4;
    c.update_rate = fb_curve_at(&m->update, threads) * 26 / c.element;
    c.copy_rate[0] = fb_curve_at(&m->h2d, large), c.copy_rate[1] = fb_curve_at(&m->d2h, large);
    c.copy_rate_both[0] = m->h2d_both, c.copy_rate_both[1] = m->d2h_both;
    return c;
}

/* ---- by size ---- */

double fb_cost_h2d(const fb_machine *m, uint64_t size)
{
    return max(m->copy_latency, over((double)size, fb_curve_at(&m->h2d, (double)size)));
}

double fb_cost_d2h(const fb_machine *m, uint64_t size)
{
    return max(m->copy_latency, over((double)size, fb_curve_at(&m->d2h, (double)size)));
}

double fb_cost_zero(const fb_machine *m, uint64_t n)
{
    return row_kernel(m, 4 * (double)n);
}

double fb_cost_grad_out(const fb_machine *m, fb_dtype act, uint64_t n)
{
    return row_kernel(m, (double)n * (fb_plan_grad_copied(act) ? 4 + (double)fb_dtype_size(act) : 4));
}

double fb_cost_update(const fb_machine *m, fb_dtype act, uint64_t n)
{
    return row_kernel(m, (double)n * (act == FB_BF16 ? 2 * (2 + 2 + 4 + 4) + 4 : 2 * (4 + 4 + 4) + 4));
}
