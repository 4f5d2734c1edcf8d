#include "run/checkpoint.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/sums.h"
#include "io/sys.h"
#include "run/checkpoint_write.h"
#include "run/masters.h"
#include "run/sink.h"

enum { CHUNK = 1 << 18, PIECE = 1 << 14, STATE_SIZE_MAX = 64 << 20 }; /* elements a task loads, and at a time */
static const char state_file[] = "trainer_state.json";

/* ---- masters and moments ---- */

/* Where one component of the state comes from. */
typedef struct source {
    fb_plan_host_region part;
    const fb_masters   *masters; /* FB_HOST_WEIGHTS */
    const fb_shard     *moments; /* the others */
} source;

typedef struct load {
    fb_state       *state;
    const source   *from;
    const fb_param *param;
    fb_error       *err;
    fb_status       failed;  /* of the task that took `fails` */
    bool            fails;
} load;

static fb_status load_piece(const load *l, uint64_t first, uint64_t n, fb_error *err)
{
    float buffer[PIECE];
    const source *from = l->from;
    uint32_t block = l->param->block;
    uint64_t at = l->param->offset + first;
    bool device = fb_state_on_device(l->state, block);
    float *f = device || from->masters ? buffer : fb_state_at(l->state, from->part, block, at); /* moments go straight home */
    fb_status st = from->masters ? fb_masters_read(from->masters, l->param, first, n, f, err)
                                 : fb_tensor_read_f32(fb_shard_find(from->moments, l->param->name), first, n, f, err);
    if (st != FB_OK)
        return st;
    uint64_t bad = fb_find_nonfinite(f, n);
    if (bad < n)
        return fb_fail(err, FB_INPUT, "'%s' is not finite at element %llu; take an earlier checkpoint", l->param->name,
                       (unsigned long long)(first + bad));
    if (device)
        return fb_state_put(l->state, from->part, block, at, n, f, err);
    if (from->masters)
        fb_state_write(l->state, block, at, n, f);
    return FB_OK;
}

static void load_chunk(void *ctx, uint64_t task, uint32_t worker)
{
    (void)worker;
    load *l = ctx;
    fb_error err;
    uint64_t n = l->param->rows * l->param->cols, end = (task + 1) * CHUNK < n ? (task + 1) * CHUNK : n;
    fb_status st = FB_OK;
    for (uint64_t at = task * CHUNK; at < end && st == FB_OK && !__atomic_load_n(&l->fails, __ATOMIC_RELAXED); at += PIECE)
        st = load_piece(l, at, end - at < PIECE ? end - at : PIECE, &err);
    if (st == FB_OK || __atomic_exchange_n(&l->fails, true, __ATOMIC_RELAXED)) /* the first to fail tells */
        return;
    l->failed = st;
    if (l->err)
        *l->err = err;
}

static fb_status load_part(fb_state *s, const source *from, fb_team *team, fb_error *err)
{
    for (uint32_t i = 0; i < s->manifest->n_param; i++) {
        const fb_param *p = &s->manifest->params[i];
        uint64_t n_task = (p->rows * p->cols + CHUNK - 1) / CHUNK;
        load l = { .state = s, .from = from, .param = p, .err = err };
        if (!fb_state_on_device(s, p->block))
            fb_team_run(team, n_task, load_chunk, &l);
        else
            for (uint64_t task = 0; task < n_task && !l.fails; task++)
                load_chunk(&l, task, 0);
        if (l.fails)
            return l.failed;
    }
    return FB_OK;
}

static fb_status load_moments(fb_state *s, fb_plan_host_region part, const char *dir, const char *file, fb_team *team,
                              fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE];
    fb_shard *shard = NULL;
    FB_TRY(fb_path_join(path, sizeof path, dir, file, err));
    FB_TRY(fb_shard_open(&shard, path, err));
    for (uint32_t i = 0; i < s->manifest->n_param; i++)
        FB_TRY(fb_check_tensor(shard, &s->manifest->params[i], FB_F32, err));
    FB_TRY(load_part(s, &(source){ .part = part, .moments = shard }, team, err));
done:
    fb_shard_close(shard);
    return st;
}

fb_status fb_checkpoint_load(fb_state *s, const char *dir, fb_team *team, fb_error *err)
{
    fb_status st = FB_OK;
    fb_masters masters = { 0 };
    FB_TRY(fb_masters_open(&masters, s->manifest, dir, err));
    FB_TRY(load_part(s, &(source){ .part = FB_HOST_WEIGHTS, .masters = &masters }, team, err));
    FB_TRY(load_moments(s, FB_HOST_M, dir, fb_adam_m_file, team, err));
    FB_TRY(load_moments(s, FB_HOST_V, dir, fb_adam_v_file, team, err));
done:
    fb_masters_close(&masters);
    return st;
}

/* ---- progress ---- */

char *fb_checkpoint_progress_text(const fb_progress *p, const json_t *identity)
{
    double epoch = p->steps_per_epoch ? (double)p->data_step / (double)p->steps_per_epoch : 0;
    json_t *root = json_pack("{s:f, s:I, s:I, s:[], s:{s:I, s:I, s:I, s:I, s:I, s:i, s:f, s:I, s:f, s:b, s:O}}",
        "epoch", epoch, "global_step", (json_int_t)p->data_step, "max_steps", (json_int_t)p->total_steps, "log_history",
        "forebay", "data_step", (json_int_t)p->data_step, "update_step", (json_int_t)p->update_step,
        "rows_per_epoch", (json_int_t)p->rows_per_epoch, "steps_per_epoch", (json_int_t)p->steps_per_epoch,
        "rope_len", (json_int_t)p->rope.len_cached, "nonfinite_in_a_row", (int)p->nonfinite_in_a_row,
        "loss_sum", p->loss_sum, "n_learned", (json_int_t)p->n_learned, "elapsed", p->elapsed, "finished", p->finished,
        "run", identity);
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(root);
    return text;
}

fb_status fb_checkpoint_write_progress(const fb_progress *p, const json_t *identity, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], *text = fb_checkpoint_progress_text(p, identity);
    if (!text)
        FB_TRY(fb_fail(err, FB_NOMEM, "checkpoint: no memory for trainer_state.json"));
    FB_TRY(fb_path_join(path, sizeof path, dir, state_file, err));
    FB_TRY(fb_file_write_atomic(path, text, strlen(text), err));
done:
    free(text);
    return st;
}

fb_status fb_checkpoint_read_progress(fb_progress *p, json_t **identity, const char *dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], *text = NULL;
    json_t *root = NULL, *run;
    json_error_t why;
    json_int_t data_step, update_step, total, rows, per_epoch, rope, learned;
    int nonfinite, finished;
    uint64_t text_size;
    FB_TRY(fb_path_join(path, sizeof path, dir, state_file, err));
    FB_TRY(fb_file_read(&text, &text_size, path, STATE_SIZE_MAX, err));
    root = json_loadb(text, text_size, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: is not JSON (line %d: %s)", path, why.line, why.text));
    *p = (fb_progress){ 0 };
    if (json_unpack_ex(root, &why, 0, "{s:I, s:{s:I, s:I, s:I, s:I, s:I, s:i, s:F, s:I, s:F, s:b, s:o}}", "max_steps", &total,
            "forebay", "data_step", &data_step, "update_step", &update_step, "rows_per_epoch", &rows,
            "steps_per_epoch", &per_epoch, "rope_len", &rope, "nonfinite_in_a_row", &nonfinite, "loss_sum", &p->loss_sum,
            "n_learned", &learned, "elapsed", &p->elapsed, "finished", &finished, "run", &run) != 0)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: is not a state that forebay wrote (%s)", path, why.text));
    if (data_step < 0 || update_step < 0 || total < 0 || rows < 0 || per_epoch < 1 || rope < 0 || rope > UINT32_MAX || nonfinite < 0
        || learned < 0)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: a counter is out of range", path));
    p->data_step = (uint64_t)data_step;
    p->update_step = (uint64_t)update_step;
    p->total_steps = (uint64_t)total;
    p->rows_per_epoch = (uint64_t)rows;
    p->steps_per_epoch = (uint64_t)per_epoch;
    p->rope.len_cached = (uint32_t)rope;
    p->nonfinite_in_a_row = (uint32_t)nonfinite;
    p->n_learned = (uint64_t)learned;
    p->finished = finished;
    if (identity)
        *identity = json_incref(run);
done:
    free(text);
    json_decref(root);
    return st;
}

/* ---- folders ---- */

/* N of a name "checkpoint-N" and the suffix, -1 for any other. */
static int64_t step_of(const char *name, const char *suffix)
{
    char *end;
    const char *digits = name + 11;
    if (strncmp(name, "checkpoint-", 11) || !isdigit((unsigned char)*digits)
        || (*digits == '0' && isdigit((unsigned char)digits[1])))
        return -1;
    errno = 0;
    long long n = strtoll(digits, &end, 10);
    return strcmp(end, suffix) || errno ? -1 : n;
}

/* Counts the folders up to a step and finds the oldest and the newest; -1: none. */
static uint32_t scan(const char *output_dir, const char *suffix, int64_t up_to, int64_t *oldest, int64_t *newest)
{
    uint32_t count = 0;
    *oldest = *newest = -1;
    DIR *d = opendir(output_dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        int64_t n = step_of(e->d_name, suffix);
        if (n < 0 || n > up_to)
            continue;
        count++;
        *newest = n > *newest ? n : *newest;
        *oldest = *oldest < 0 || n < *oldest ? n : *oldest;
    }
    if (d)
        closedir(d);
    return count;
}

fb_status fb_checkpoint_folder(char dir[FB_PATH_SIZE], const char *output_dir, uint64_t step, const char *suffix, fb_error *err)
{
    char name[64];
    snprintf(name, sizeof name, "checkpoint-%llu%s", (unsigned long long)step, suffix);
    return fb_path_join(dir, FB_PATH_SIZE, output_dir, name, err);
}

fb_status fb_checkpoint_publish(const char *output_dir, uint64_t step, fb_error *err)
{
    fb_status st = FB_OK;
    char dir[FB_PATH_SIZE], unfinished[FB_PATH_SIZE];
    FB_TRY(fb_checkpoint_folder(dir, output_dir, step, "", err));
    FB_TRY(fb_checkpoint_folder(unfinished, output_dir, step, ".tmp", err));
    FB_TRY(fb_dir_sync(unfinished, err));
    /* Where an earlier run left this very step, the two change places: at no moment is there neither. */
    bool exists = access(dir, F_OK) == 0;
    int failed = fb_sys_renameat2(unfinished, dir, exists ? RENAME_EXCHANGE : 0);
    if (failed && exists && (errno == EINVAL || errno == ENOSYS)) { /* a file system that cannot exchange */
        FB_TRY(fb_dir_remove(dir, err));
        failed = fb_sys_rename(unfinished, dir);
    }
    if (failed)
        FB_TRY(fb_fail(err, FB_IO, "%s: cannot be renamed into place: %s", unfinished, strerror(errno)));
    FB_TRY(fb_dir_sync(output_dir, err));
    if (exists)
        FB_TRY(fb_dir_remove(unfinished, err));
done:
    return st;
}

/* Under the name of an unfinished one first: killed on the way, it is not taken for a checkpoint. */
static fb_status remove_checkpoint(const char *output_dir, int64_t step, fb_error *err)
{
    fb_status st = FB_OK;
    char dir[FB_PATH_SIZE], unfinished[FB_PATH_SIZE];
    FB_TRY(fb_checkpoint_folder(dir, output_dir, (uint64_t)step, "", err));
    FB_TRY(fb_checkpoint_folder(unfinished, output_dir, (uint64_t)step, ".tmp", err));
    FB_TRY(fb_dir_remove(unfinished, err));
    if (fb_sys_rename(dir, unfinished) != 0)
        FB_TRY(fb_fail(err, FB_IO, "%s: cannot be renamed to be removed: %s", dir, strerror(errno)));
    FB_TRY(fb_dir_remove(unfinished, err));
done:
    return st;
}

/* Oldest first, until at most n_kept are left. */
static fb_status remove_down_to(const char *output_dir, int64_t up_to, uint32_t n_kept, fb_error *err)
{
    int64_t oldest, newest;
    fb_status st = FB_OK;
    while (st == FB_OK && scan(output_dir, "", up_to, &oldest, &newest) > n_kept)
        st = remove_checkpoint(output_dir, oldest, err);
    return st;
}

fb_status fb_checkpoint_prune(const char *output_dir, uint64_t step, uint32_t n_kept, fb_error *err)
{
    return n_kept ? remove_down_to(output_dir, (int64_t)step, n_kept, err) : FB_OK;
}

fb_status fb_checkpoint_remove_all(const char *output_dir, fb_error *err)
{
    return remove_down_to(output_dir, INT64_MAX, 0, err);
}

uint32_t fb_checkpoint_count(const char *output_dir)
{
    int64_t oldest, newest;
    return scan(output_dir, "", INT64_MAX, &oldest, &newest);
}

uint64_t fb_checkpoint_bytes(const char *output_dir)
{
    char dir[FB_PATH_SIZE];
    uint64_t bytes = 0;
    struct stat info;
    DIR *d = opendir(output_dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (step_of(e->d_name, "") < 0 || fb_path_join(dir, sizeof dir, output_dir, e->d_name, NULL) != FB_OK)
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

fb_status fb_checkpoint_sweep(const char *output_dir, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    int64_t oldest, newest;
    char dir[FB_PATH_SIZE];
    while (scan(output_dir, ".tmp", INT64_MAX, &oldest, &newest)) {
        FB_TRY(fb_checkpoint_folder(dir, output_dir, (uint64_t)oldest, ".tmp", err));
        fb_say(sink, FB_SAY_WARNING, "%s: is half a checkpoint, left by a run that was killed; it is removed", dir);
        FB_TRY(fb_dir_remove(dir, err));
    }
done:
    return st;
}

bool fb_checkpoint_any(const char *output_dir)
{
    int64_t oldest, newest;
    return scan(output_dir, "", INT64_MAX, &oldest, &newest) > 0;
}

fb_status fb_checkpoint_verify(const char *dir, const fb_sink *sink, fb_error *err)
{
    fb_say(sink, FB_SAY_PROGRESS, "reads %s, to see that it is whole", dir);
    return fb_sums_verify(dir, err);
}

fb_status fb_checkpoint_find(char dir[FB_PATH_SIZE], const char *output_dir, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    fb_error damage;
    int64_t oldest, newest, up_to = INT64_MAX;
    uint32_t n_damaged = 0;
    for (; scan(output_dir, "", up_to, &oldest, &newest); up_to = newest - 1, n_damaged++) {
        FB_TRY(fb_checkpoint_folder(dir, output_dir, (uint64_t)newest, "", err));
        if (fb_checkpoint_verify(dir, sink, &damage) == FB_OK)
            return FB_OK;
        fb_say(sink, FB_SAY_WARNING, "checkpoint-%lld is passed over: %s", (long long)newest, damage.msg);
    }
    dir[0] = 0;
    if (n_damaged)
        FB_TRY(fb_fail(err, FB_INPUT, "%s: none of its %u checkpoints is whole; bring one back, or start afresh with "
                       "resume_from_checkpoint: false and overwrite_output_dir: true", output_dir, n_damaged));
done:
    return st;
}
