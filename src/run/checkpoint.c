#include "run/checkpoint.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/file.h"
#include "io/shard_write.h"
#include "run/export.h"

enum { PIECE = 1 << 16, STATE_SIZE_MAX = 64 << 20 };
static const char optimizer_file[] = "optimizer.safetensors";
static const char state_file[] = "trainer_state.json";
static const char *const prefixes[] = { "w.", "m.", "v." };
static const fb_plan_host_region parts[] = { FB_HOST_WEIGHTS, FB_HOST_M, FB_HOST_V };
static_assert(FB_COUNT(parts) == FB_COUNT(prefixes), "a part without a prefix");

/* ---- masters and moments ---- */

static void tensor_name(char name[FB_NAME_SIZE + 2], size_t kind, const fb_param *p)
{
    snprintf(name, FB_NAME_SIZE + 2, "%s%s", prefixes[kind], p->name);
}

static fb_status write_optimizer(const fb_state *s, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = s->manifest;
    char name[FB_NAME_SIZE + 2];
    fb_shard_writer *w = NULL;
    float *piece = malloc(PIECE * sizeof *piece);
    if (!piece)
        FB_TRY(fb_fail(err, FB_NOMEM, "checkpoint: no memory for a buffer"));
    FB_TRY(fb_shard_writer_new(&w, dir, "optimizer", UINT64_MAX / 2, err));
    for (size_t kind = 0; kind < FB_COUNT(prefixes); kind++)
        for (uint32_t i = 0; i < m->n_param; i++) {
            const fb_param *p = &m->params[i];
            tensor_name(name, kind, p);
            FB_TRY(fb_shard_writer_declare(w, name, FB_F32, p->rank, (uint64_t[]){ p->rows, p->cols }, err));
        }
    for (size_t kind = 0; kind < FB_COUNT(prefixes); kind++)
        for (uint32_t i = 0; i < m->n_param; i++) {
            const fb_param *p = &m->params[i];
            for (uint64_t at = 0, n = p->rows * p->cols, k; at < n; at += k) {
                k = n - at < PIECE ? n - at : PIECE;
                FB_TRY(fb_state_get(s, parts[kind], p->block, p->offset + at, k, piece, err));
                FB_TRY(fb_shard_writer_append(w, piece, k * sizeof *piece, err));
            }
        }
    st = fb_shard_writer_finish(w, err);
    w = NULL;
done:
    fb_shard_writer_abandon(w);
    free(piece);
    return st;
}

static bool has_shape_of(const fb_tensor *t, const fb_param *p)
{
    return t->rank == p->rank && t->shape[0] == p->rows && (p->rank == 1 || t->shape[1] == p->cols);
}

fb_status fb_checkpoint_load(fb_state *s, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = s->manifest;
    char path[FB_PATH_SIZE], name[FB_NAME_SIZE + 2];
    fb_shard *shard = NULL;
    float *piece = malloc(PIECE * sizeof *piece);
    if (!piece)
        FB_TRY(fb_fail(err, FB_NOMEM, "checkpoint: no memory for a buffer"));
    FB_TRY(fb_path_join(path, sizeof path, dir, optimizer_file, err));
    FB_TRY(fb_shard_open(&shard, path, err));
    for (size_t kind = 0; kind < FB_COUNT(prefixes); kind++)
        for (uint32_t i = 0; i < m->n_param; i++) {
            const fb_param *p = &m->params[i];
            uint64_t n = p->rows * p->cols;
            tensor_name(name, kind, p);
            const fb_tensor *t = fb_shard_find(shard, name);
            if (!t || t->dtype != FB_F32 || !has_shape_of(t, p))
                FB_TRY(fb_fail(err, FB_INPUT, "%s: '%s' is %s; the checkpoint is of another model", path, name,
                               t ? "of another shape" : "missing"));
            for (uint64_t at = 0, k; at < n; at += k) {
                k = n - at < PIECE ? n - at : PIECE;
                memcpy(piece, (const unsigned char *)t->data + at * sizeof *piece, k * sizeof *piece);
                for (uint64_t j = 0; j < k; j++)
                    if (!isfinite(piece[j]))
                        FB_TRY(fb_fail(err, FB_INPUT, "%s: '%s' is not finite at element %llu; the checkpoint is damaged", path,
                                       name, (unsigned long long)(at + j)));
                FB_TRY(fb_state_put(s, parts[kind], p->block, p->offset + at, k, piece, err));
            }
        }
done:
    fb_shard_close(shard);
    free(piece);
    return st;
}

/* ---- progress ---- */

fb_status fb_checkpoint_write_progress(const fb_progress *p, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], *text = NULL;
    double epoch = p->steps_per_epoch ? (double)p->data_step / (double)p->steps_per_epoch : 0;
    json_t *root = json_pack("{s:f, s:I, s:I, s:[], s:{s:I, s:I, s:I, s:I, s:I, s:i, s:f, s:b, s:s}}",
        "epoch", epoch, "global_step", (json_int_t)p->data_step, "max_steps", (json_int_t)p->total_steps, "log_history",
        "forebay", "data_step", (json_int_t)p->data_step, "update_step", (json_int_t)p->update_step,
        "rows_per_epoch", (json_int_t)p->rows_per_epoch, "steps_per_epoch", (json_int_t)p->steps_per_epoch,
        "rope_len", (json_int_t)p->rope.len_cached, "nonfinite_in_a_row", (int)p->nonfinite_in_a_row,
        "elapsed", p->elapsed, "finished", p->finished, "fingerprint", p->fingerprint);
    text = root ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    if (!text)
        FB_TRY(fb_fail(err, FB_NOMEM, "checkpoint: no memory for trainer_state.json"));
    FB_TRY(fb_path_join(path, sizeof path, dir, state_file, err));
    FB_TRY(fb_file_write_atomic(path, text, strlen(text), err));
done:
    free(text);
    json_decref(root);
    return st;
}

fb_status fb_checkpoint_read_progress(fb_progress *p, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], *text = NULL;
    const char *fingerprint;
    json_t *root = NULL;
    json_error_t why;
    json_int_t data_step, update_step, total, rows, per_epoch, rope;
    int nonfinite, finished;
    uint64_t text_size;
    FB_TRY(fb_path_join(path, sizeof path, dir, state_file, err));
    FB_TRY(fb_file_read(&text, &text_size, path, STATE_SIZE_MAX, err));
    root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: is not JSON (line %d: %s)", path, why.line, why.text));
    *p = (fb_progress){ 0 };
    if (json_unpack_ex(root, &why, 0, "{s:I, s:{s:I, s:I, s:I, s:I, s:I, s:i, s:F, s:b, s:s}}", "max_steps", &total,
            "forebay", "data_step", &data_step, "update_step", &update_step, "rows_per_epoch", &rows,
            "steps_per_epoch", &per_epoch, "rope_len", &rope, "nonfinite_in_a_row", &nonfinite, "elapsed", &p->elapsed,
            "finished", &finished, "fingerprint", &fingerprint) != 0)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: is not a state that forebay wrote (%s)", path, why.text));
    if (data_step < 0 || update_step < 0 || total < 0 || rows < 0 || per_epoch < 1 || rope < 0 || rope > UINT32_MAX || nonfinite < 0
        || strlen(fingerprint) >= sizeof p->fingerprint)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: a counter is out of range", path));
    p->data_step = (uint64_t)data_step;
    p->update_step = (uint64_t)update_step;
    p->total_steps = (uint64_t)total;
    p->rows_per_epoch = (uint64_t)rows;
    p->steps_per_epoch = (uint64_t)per_epoch;
    p->rope.len_cached = (uint32_t)rope;
    p->nonfinite_in_a_row = (uint32_t)nonfinite;
    p->finished = finished;
    memcpy(p->fingerprint, fingerprint, strlen(fingerprint) + 1);
done:
    free(text);
    json_decref(root);
    return st;
}

/* ---- folders ---- */

/* N of a name "checkpoint-N", -1 for any other. */
static int64_t step_of(const char *name)
{
    char *end;
    if (strncmp(name, "checkpoint-", 11) || name[11] < '0' || name[11] > '9')
        return -1;
    errno = 0;
    long long n = strtoll(name + 11, &end, 10);
    return *end || errno ? -1 : n;
}

/* Counts the checkpoints of a folder and finds the oldest and the newest; -1: none. */
static uint32_t scan(const char *output_dir, int64_t *oldest, int64_t *newest)
{
    uint32_t count = 0;
    *oldest = *newest = -1;
    DIR *d = opendir(output_dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        int64_t n = step_of(e->d_name);
        if (n < 0)
            continue;
        count++;
        *newest = n > *newest ? n : *newest;
        *oldest = *oldest < 0 || n < *oldest ? n : *oldest;
    }
    if (d)
        closedir(d);
    return count;
}

static fb_status folder_of(char *dir, const char *output_dir, int64_t step, const char *suffix, fb_error *err)
{
    char name[64];
    snprintf(name, sizeof name, "checkpoint-%lld%s", (long long)step, suffix);
    return fb_path_join(dir, FB_PATH_SIZE, output_dir, name, err);
}

fb_status fb_checkpoint_save(const fb_state *s, const fb_progress *p, const fb_options *o, fb_dtype save_dtype, fb_error *err)
{
    fb_status st = FB_OK;
    char dir[FB_PATH_SIZE], unfinished[FB_PATH_SIZE];
    FB_TRY(folder_of(dir, o->output_dir, (int64_t)p->data_step, "", err));
    FB_TRY(folder_of(unfinished, o->output_dir, (int64_t)p->data_step, ".tmp", err));
    FB_TRY(fb_dir_remove(unfinished, err));
    FB_TRY(fb_dir_make(unfinished, err));
    FB_TRY(write_optimizer(s, unfinished, err));
    FB_TRY(fb_checkpoint_write_progress(p, unfinished, err));
    FB_TRY(fb_export_model(s, o->model_name_or_path, unfinished, save_dtype, err));
    FB_TRY(fb_dir_sync(unfinished, err));
    /* Where an earlier run left this very step, the two change places: at no moment is there neither. */
    bool exists = access(dir, F_OK) == 0;
    if (renameat2(AT_FDCWD, unfinished, AT_FDCWD, dir, exists ? RENAME_EXCHANGE : 0) != 0)
        FB_TRY(fb_fail(err, FB_IO, "%s: cannot be renamed into place: %s", unfinished, strerror(errno)));
    if (exists)
        FB_TRY(fb_dir_remove(unfinished, err));
    FB_TRY(fb_dir_sync(o->output_dir, err));
    FB_TRY(fb_checkpoint_prune(o, err));
done:
    return st;
}

/* Oldest first, until at most n_kept are left. */
static fb_status remove_down_to(const char *output_dir, uint32_t n_kept, fb_error *err)
{
    char dir[FB_PATH_SIZE];
    int64_t oldest, newest;
    while (scan(output_dir, &oldest, &newest) > n_kept) {
        fb_status st = folder_of(dir, output_dir, oldest, "", err);
        if (st == FB_OK)
            st = fb_dir_remove(dir, err);
        if (st != FB_OK)
            return st;
    }
    return FB_OK;
}

fb_status fb_checkpoint_prune(const fb_options *o, fb_error *err)
{
    return o->save_total_limit ? remove_down_to(o->output_dir, o->save_total_limit, err) : FB_OK;
}

fb_status fb_checkpoint_remove_all(const char *output_dir, fb_error *err)
{
    return remove_down_to(output_dir, 0, err);
}

uint32_t fb_checkpoint_count(const char *output_dir)
{
    int64_t oldest, newest;
    return scan(output_dir, &oldest, &newest);
}

uint64_t fb_checkpoint_bytes(const char *output_dir)
{
    char dir[FB_PATH_SIZE];
    uint64_t bytes = 0;
    struct stat info;
    DIR *d = opendir(output_dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (step_of(e->d_name) < 0 || fb_path_join(dir, sizeof dir, output_dir, e->d_name, NULL) != FB_OK)
            continue;
        DIR *inner = opendir(dir);
        for (struct dirent *f; inner && (f = readdir(inner));)
            if (fstatat(dirfd(inner), f->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode))
                bytes += (uint64_t)info.st_blocks * 512;
        if (inner)
            closedir(inner);
    }
    if (d)
        closedir(d);
    return bytes;
}

fb_status fb_checkpoint_find(char dir[FB_PATH_SIZE], const char *output_dir, fb_error *err)
{
    int64_t oldest, newest;
    dir[0] = 0;
    scan(output_dir, &oldest, &newest);
    return newest < 0 ? FB_OK : folder_of(dir, output_dir, newest, "", err);
}
