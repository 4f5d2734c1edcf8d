#include "run/loader.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/random.h"

/* Rows that packing keeps open at once: more waste less, and look further; 64 leave under 2% at usual lengths. */
enum { OPEN_ROWS = 64 };

struct fb_loader {
    const fb_tokens  *tokens;
    fb_loader_options o;
    uint64_t          n_row;
    uint64_t         *doc;       /* [n_doc] documents, row after row */
    uint64_t         *row_first; /* [n_row + 1] into doc */
    uint64_t         *order;     /* [n_row] rows in this epoch's order */
    uint64_t          epoch;     /* of order; UINT64_MAX: none yet */
    int32_t          *labels;    /* [row_len] of the document being added */
};

/* Uniform in [0, n), without bias: Lemire 2019. */
static uint64_t random_below(uint64_t *state, uint64_t n)
{
    for (;;) {
        unsigned __int128 product = (unsigned __int128)fb_random_next(state) * n;
        if ((uint64_t)product >= (0 - n) % n)
            return (uint64_t)(product >> 64);
    }
}

static void shuffle(uint64_t *items, uint64_t n, uint64_t seed, uint64_t stream)
{
    uint64_t state = seed;
    state = fb_random_next(&state) ^ stream * 0xd1342543de82ef95u;
    for (uint64_t i = n; i > 1; i--) { /* Fisher and Yates, as Durstenfeld 1964 */
        uint64_t j = random_below(&state, i), t = items[i - 1];
        items[i - 1] = items[j];
        items[j] = t;
    }
}

static uint64_t doc_len(const fb_loader *l, uint64_t doc)
{
    return l->tokens->doc_start[doc + 1] - l->tokens->doc_start[doc];
}

/* ---- packing ---- */

/* Best fit among a window of open rows; when a document fits none, the fullest is closed.  Keeping the file's order
 * (no shuffling) means a window of one.  row_of[doc]: its row, in order of closing. */
static uint64_t assign_rows(const fb_loader *l, const uint64_t *sequence, uint64_t *row_of)
{
    uint64_t room[OPEN_ROWS], row[OPEN_ROWS], n_row = 0;
    uint32_t n_open = 0, open_max = l->o.shuffle ? OPEN_ROWS : 1;
    for (uint64_t i = 0; i < l->tokens->n_doc; i++) {
        uint64_t len = doc_len(l, sequence[i]);
        uint32_t best = UINT32_MAX, fullest = 0;
        for (uint32_t k = 0; k < n_open; k++) {
            if (room[k] >= len && (best == UINT32_MAX || room[k] < room[best]))
                best = k;
            if (room[k] < room[fullest])
                fullest = k;
        }
        if (best == UINT32_MAX) {
            best = n_open < open_max ? n_open++ : fullest;
            room[best] = l->o.row_len;
            row[best] = n_row++;
        }
        room[best] -= len;
        row_of[sequence[i]] = row[best];
    }
    return n_row;
}

/* Documents grouped by row (counting sort), in the sequence's order within a row. */
static void group_rows(fb_loader *l, const uint64_t *sequence, const uint64_t *row_of)
{
    uint64_t n_doc = l->tokens->n_doc;
    for (uint64_t d = 0; d < n_doc; d++)
        l->row_first[row_of[d] + 1]++;
    for (uint64_t r = 0; r < l->n_row; r++)
        l->row_first[r + 1] += l->row_first[r];
    for (uint64_t i = 0; i < n_doc; i++)
        l->doc[l->row_first[row_of[sequence[i]]]++] = sequence[i];
    for (uint64_t r = l->n_row; r > 0; r--) /* the starts have moved to the ends; move them back */
        l->row_first[r] = l->row_first[r - 1];
    l->row_first[0] = 0;
}

static fb_status make_rows(fb_loader *l, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t n_doc = l->tokens->n_doc, *sequence = calloc(n_doc, sizeof *sequence), *row_of = calloc(n_doc, sizeof *row_of);
    l->doc = calloc(n_doc, sizeof *l->doc);
    l->row_first = calloc(n_doc + 1, sizeof *l->row_first);
    l->order = calloc(n_doc, sizeof *l->order);
    l->labels = calloc(l->o.row_len, sizeof *l->labels);
    if (!sequence || !row_of || !l->doc || !l->row_first || !l->order || !l->labels)
        FB_TRY(fb_fail(err, FB_NOMEM, "data: no memory for the order of %llu documents", (unsigned long long)n_doc));
    for (uint64_t i = 0; i < n_doc; i++)
        sequence[i] = row_of[i] = i;
    l->n_row = n_doc;
    if (l->o.packing) {
        if (l->o.shuffle)
            shuffle(sequence, n_doc, l->o.seed, 0);
        l->n_row = assign_rows(l, sequence, row_of);
    }
    group_rows(l, sequence, row_of);
done:
    free(sequence);
    free(row_of);
    return st;
}

fb_status fb_loader_new(fb_loader **out, const fb_tokens *tokens, const fb_loader_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    assert(o->rows_per_step >= 1 && o->rows_per_micro >= 1);
    if (tokens->n_doc == 0)
        return fb_fail(err, FB_INPUT, "data: the dataset has no rows");
    if (tokens->doc_len_max > o->row_len)
        return fb_fail(err, FB_INPUT, "data: a document has %u tokens, a row holds %u; raise cutoff_len", tokens->doc_len_max,
                       o->row_len);
    fb_loader *l = calloc(1, sizeof *l);
    if (!l)
        return fb_fail(err, FB_NOMEM, "data: no memory for the loader");
    l->tokens = tokens;
    l->o = *o;
    l->epoch = UINT64_MAX;
    FB_TRY(make_rows(l, err));
    *out = l;
    l = NULL;
done:
    fb_loader_free(l);
    return st;
}

void fb_loader_free(fb_loader *l)
{
    if (!l)
        return;
    free(l->doc);
    free(l->row_first);
    free(l->order);
    free(l->labels);
    free(l);
}

uint64_t fb_loader_rows(const fb_loader *l)
{
    return l->n_row;
}

uint64_t fb_loader_steps_per_epoch(const fb_loader *l)
{
    return (l->n_row + l->o.rows_per_step - 1) / l->o.rows_per_step;
}

/* The step's rows are order[*first .. *first + *n). */
static void locate(fb_loader *l, uint64_t step, uint64_t *first, uint32_t *n)
{
    uint64_t per_epoch = fb_loader_steps_per_epoch(l), epoch = step / per_epoch;
    if (epoch != l->epoch) {
        for (uint64_t i = 0; i < l->n_row; i++)
            l->order[i] = i;
        if (l->o.shuffle)
            shuffle(l->order, l->n_row, l->o.seed, epoch + 1);
        l->epoch = epoch;
    }
    *first = step % per_epoch * l->o.rows_per_step;
    *n = (uint32_t)(l->n_row - *first < l->o.rows_per_step ? l->n_row - *first : l->o.rows_per_step);
}

static void add_row(fb_loader *l, fb_micro *micro, uint64_t row)
{
    for (uint64_t i = l->row_first[row]; i < l->row_first[row + 1]; i++) {
        uint64_t start = l->tokens->doc_start[l->doc[i]];
        uint32_t n = (uint32_t)doc_len(l, l->doc[i]);
        for (uint32_t t = 0; t < n; t++)
            l->labels[t] = fb_tokens_label(l->tokens, start + t);
        fb_micro_add_document(micro, l->tokens->ids + start, l->labels, n);
    }
}

uint32_t fb_loader_fill(fb_loader *l, fb_engine *e, uint64_t step, uint32_t *rows)
{
    uint64_t first;
    uint32_t n, n_micro = 0;
    locate(l, step, &first, &n);
    for (uint32_t at = 0; at < n; at += l->o.rows_per_micro) {
        fb_micro *micro = fb_engine_micro(e, n_micro++);
        fb_micro_begin(micro);
        for (uint32_t i = at; i < n && i < at + l->o.rows_per_micro; i++)
            add_row(l, micro, l->order[first + i]);
        fb_micro_finish(micro);
    }
    if (rows)
        *rows = n;
    return n_micro;
}

void fb_loader_describe(fb_loader *l, uint64_t step, char *buf, size_t size)
{
    uint64_t first;
    uint32_t n;
    size_t at = 0;
    locate(l, step, &first, &n);
    buf[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t row = l->order[first + i];
        for (uint64_t d = l->row_first[row]; d < l->row_first[row + 1]; d++) {
            int k = snprintf(buf + at, size - at, "%s%llu", at ? ", " : "", (unsigned long long)l->doc[d]);
            if (k < 0 || (size_t)k >= size - at) {
                snprintf(buf + (at > 4 ? at - 4 : 0), 5, " ...");
                return;
            }
            at += (size_t)k;
        }
    }
}
