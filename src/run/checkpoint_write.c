#include "run/checkpoint_write.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "io/file.h"
#include "io/shard_write.h"
#include "optim/adamw.h"
#include "run/export.h"

const char fb_remainders_file[] = "remainders.safetensors", fb_masters_file[] = "masters.safetensors",
           fb_adam_m_file[] = "adam_m.safetensors", fb_adam_v_file[] = "adam_v.safetensors";

enum { CONVERTED = 1 << 14 }; /* elements at a time: what is between stays in the cache */

/* EXACT completes the weights to the masters: remainders or masters; absent with float32. */
typedef enum { PART_WEIGHTS, PART_EXACT, PART_M, PART_V, PART_COUNT } part;

struct fb_checkpoint_writer {
    const fb_manifest *manifest;
    fb_dtype           save_dtype;
    fb_shard_writer   *files[PART_COUNT];
    fb_sums            sums;
};

static bool has_part(fb_dtype save_dtype, part p)
{
    return p != PART_EXACT || save_dtype != FB_F32;
}

static fb_dtype dtype_of(fb_dtype save_dtype, part p)
{
    return p == PART_WEIGHTS ? save_dtype : p == PART_EXACT && save_dtype == FB_BF16 ? FB_I16 : FB_F32;
}

static fb_status declare_all(fb_checkpoint_writer *w, part p, const uint32_t *order, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = w->manifest;
    for (uint32_t i = 0; i < m->n_block; i++) {
        const fb_block_desc *d = &m->blocks[order[i]];
        for (const fb_param *q = &m->params[d->param_first]; q < &m->params[d->param_first + d->n_param]; q++)
            FB_TRY(fb_shard_writer_declare(w->files[p], q->name, dtype_of(w->save_dtype, p), q->rank,
                                           (uint64_t[]){ q->rows, q->cols }, err));
    }
done:
    return st;
}

fb_status fb_checkpoint_writer_new(fb_checkpoint_writer **out, const fb_manifest *m, const uint32_t *order, const char *dir,
                                   fb_dtype save_dtype, fb_error *err)
{
    fb_status st = FB_OK;
    const char *const stems[] = { "model", save_dtype == FB_BF16 ? "remainders" : "masters", "adam_m", "adam_v" };
    fb_checkpoint_writer *w = calloc(1, sizeof *w);
    if (!w)
        return fb_fail_file(err, FB_NOMEM, dir, "no memory to write a checkpoint");
    w->manifest = m;
    w->save_dtype = save_dtype;
    for (part p = 0; p < PART_COUNT; p++) {
        if (!has_part(save_dtype, p))
            continue;
        FB_TRY(fb_shard_writer_new(&w->files[p], dir, stems[p], p == PART_WEIGHTS ? FB_EXPORT_SHARD_SIZE : UINT64_MAX / 2, err));
        fb_shard_writer_sum(w->files[p], &w->sums);
        FB_TRY(declare_all(w, p, order, err));
    }
    *out = w;
    w = NULL;
done:
    fb_checkpoint_writer_abandon(w);
    return st;
}

static fb_status append(fb_checkpoint_writer *w, part p, const void *data, uint64_t n, fb_error *err)
{
    return fb_shard_writer_append(w->files[p], data, n * fb_dtype_size(dtype_of(w->save_dtype, p)), err);
}

/* n weights from an exact float32 to what is saved. */
static fb_status append_converted(fb_checkpoint_writer *w, const float *master, uint64_t n, fb_error *err)
{
    fb_status st = FB_OK;
    uint16_t half[CONVERTED];
    int16_t lo[CONVERTED];
    if (w->save_dtype == FB_BF16) {
        fb_split_f32(half, lo, master, n);
        FB_TRY(append(w, PART_EXACT, lo, n, err));
        FB_TRY(append(w, PART_WEIGHTS, half, n, err));
    } else {
        fb_from_f32(half, w->save_dtype, master, n);
        FB_TRY(append(w, PART_EXACT, master, n, err));
        FB_TRY(append(w, PART_WEIGHTS, half, n, err));
    }
done:
    return st;
}

static fb_status append_weights(fb_checkpoint_writer *w, const fb_piece *piece, uint64_t at, uint64_t n, fb_error *err)
{
    fb_status st = FB_OK;
    if (piece->dtype == FB_F32 && w->save_dtype == FB_F32)
        return append(w, PART_WEIGHTS, (const float *)piece->weights + at, n, err);
    if (piece->dtype == FB_BF16 && w->save_dtype == FB_BF16) {
        FB_TRY(append(w, PART_EXACT, piece->remainders + at, n, err));
        return append(w, PART_WEIGHTS, (const uint16_t *)piece->weights + at, n, err);
    }
    for (uint64_t i = 0, k; i < n; i += k) {
        float joined[CONVERTED];
        const float *master = joined;
        k = n - i < CONVERTED ? n - i : CONVERTED;
        if (piece->dtype == FB_F32)
            master = (const float *)piece->weights + at + i;
        else
            fb_join_f32(joined, (const uint16_t *)piece->weights + at + i, piece->remainders + at + i, k);
        FB_TRY(w->save_dtype == FB_F32 ? append(w, PART_WEIGHTS, master, k, err) : append_converted(w, master, k, err));
    }
done:
    return st;
}

fb_status fb_checkpoint_writer_append(fb_checkpoint_writer *w, uint32_t block, uint64_t first, uint64_t n, const fb_piece *piece,
                                      fb_error *err)
{
    fb_status st = FB_OK;
    const fb_block_desc *d = &w->manifest->blocks[block];
    for (const fb_param *p = &w->manifest->params[d->param_first]; p < &w->manifest->params[d->param_first + d->n_param]; p++) {
        uint64_t end = p->offset + p->rows * p->cols;
        uint64_t from = p->offset > first ? p->offset : first, to = end < first + n ? end : first + n;
        if (from >= to)
            continue;
        FB_TRY(append_weights(w, piece, from - first, to - from, err));
        FB_TRY(append(w, PART_M, piece->m + (from - first), to - from, err));
        FB_TRY(append(w, PART_V, piece->v + (from - first), to - from, err));
    }
done:
    return st;
}

fb_status fb_checkpoint_writer_finish(fb_checkpoint_writer *w, fb_sums *sums, fb_error *err)
{
    fb_status st = FB_OK;
    for (part p = 0; p < PART_COUNT; p++) {
        if (!w->files[p])
            continue;
        fb_shard_writer *file = w->files[p];
        w->files[p] = NULL;
        FB_TRY(fb_shard_writer_finish(file, err));
    }
    *sums = w->sums;
    w->sums = (fb_sums){ 0 };
done:
    fb_checkpoint_writer_abandon(w);
    return st;
}

void fb_checkpoint_writer_abandon(fb_checkpoint_writer *w)
{
    if (!w)
        return;
    for (part p = 0; p < PART_COUNT; p++)
        fb_shard_writer_abandon(w->files[p]);
    fb_sums_free(&w->sums);
    free(w);
}

uint64_t fb_checkpoint_size(const fb_manifest *m, fb_dtype save_dtype)
{
    uint64_t size = 0;
    for (part p = 0; p < PART_COUNT; p++)
        size += has_part(save_dtype, p) ? m->n_weight * fb_dtype_size(dtype_of(save_dtype, p)) : 0;
    return size;
}
