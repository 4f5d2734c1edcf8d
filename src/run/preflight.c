#include "run/preflight.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "io/file.h"
#include "io/sys.h"

/* Of forebay.data: Python with what it loads for rows of ids took 18 MiB; a tokenizer of 11 MiB brought that to 196. */
static const uint64_t PYTHON_BYTES = 32u << 20, TOKENIZER_FACTOR = 16;

static double mib(uint64_t bytes)
{
    return (double)bytes / 0x1p20;
}

fb_status fb_preflight_folder(const char *output_dir, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE];
    FB_TRY(fb_dir_make(output_dir, err));
    FB_TRY(fb_path_join(path, sizeof path, output_dir, ".forebay.probe", err));
    FB_TRY(fb_file_write_atomic(path, "can this folder be written?\n", 28, err));
    if (fb_sys_unlink(path) != 0)
        FB_TRY(fb_fail_file(err, FB_IO, path, "cannot be removed: %s", strerror(errno)));
done:
    return st;
}

/* ---- memory ----
 *
 * The state is mapped without a reservation and touched at start: a mapping that is too large succeeds, and the kernel kills
 * the process when the pages are wanted.  So nobody but this check can refuse it.
 *
 * Pinned memory has no limit of its own to look at.  cudaHostRegister pins pages through the driver (pin_user_pages), which
 * charges them to the process's memory and cgroup like any others and does not look at RLIMIT_MEMLOCK (ulimit -l); what pinning
 * changes is that they can never be swapped, and swap is not counted here anyway. */

fb_status fb_preflight_data(const char *model_dir, const fb_memory_room *room, fb_error *err)
{
    char path[FB_PATH_SIZE];
    struct stat tokenizer;
    fb_status st = fb_path_join(path, sizeof path, model_dir, "tokenizer.json", err);
    if (st != FB_OK)
        return st;
    uint64_t needed = PYTHON_BYTES + (stat(path, &tokenizer) == 0 ? TOKENIZER_FACTOR * (uint64_t)tokenizer.st_size : 0);
    if (needed <= room->bytes)
        return FB_OK;
    return fb_fail(err, FB_NOFIT, "host memory: preparing the data takes up to %.1f MiB, %s leaves %.1f MiB; free memory or raise "
                   "that limit", mib(needed), room->limit, mib(room->bytes));
}

fb_status fb_preflight_host(uint64_t needed, uint64_t ram_budget, const fb_memory_room *room, fb_error *err)
{
    uint64_t with_unseen = needed + fb_memory_unseen(needed);
    if (ram_budget > room->bytes)
        return fb_fail(err, FB_NOFIT, "host memory: ram_budget is %.1f MiB, %s leaves %.1f MiB; set ram_budget to auto or to at "
                       "most that, or free memory", mib(ram_budget), room->limit, mib(room->bytes));
    if (with_unseen > room->bytes)
        return fb_fail(err, FB_NOFIT, "host memory: the run takes %.1f MiB and about %.1f MiB beside its ledger, %s leaves "
                       "%.1f MiB; free memory or raise that limit, or set a smaller micro_batch or cutoff_len, or take a smaller "
                       "model", mib(needed), mib(with_unseen - needed), room->limit, mib(room->bytes));
    return FB_OK;
}

fb_status fb_preflight_device(uint64_t needed, uint64_t hbm_budget, uint64_t memory_free, fb_error *err)
{
    if (!memory_free || needed <= memory_free)
        return FB_OK;
    return fb_fail(err, FB_NOFIT, "device memory: the run takes %.1f MiB (hbm_budget is %.1f MiB), %.1f MiB are free; lower "
                   "hbm_budget, or end what else uses the device", mib(needed), mib(hbm_budget), mib(memory_free));
}

fb_status fb_preflight_memory(const fb_session *s, const fb_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    fb_memory_room room;
    const fb_device_info *d = &s->info;
    if (fb_memory_room_now(&room))
        FB_TRY(fb_preflight_host(s->plan.host_bytes + (d->unified ? s->plan.device_bytes : 0), o->ram_budget, &room, err));
    if (!d->unified)
        FB_TRY(fb_preflight_device(s->plan.device_bytes + d->memory_overhead, o->hbm_budget, d->memory_free, err));
done:
    return st;
}

/* ---- disk ---- */

/* Beside the numbers: a header line a tensor; the log, the state, and files rounded up to whole blocks. */
static const uint64_t HEADER_BYTES = 256, SMALL_BYTES = 128u << 10;

/* Checkpoints that are due after step `done` and up to step `total`. */
static uint64_t saves_due(const fb_options *o, uint64_t total, uint64_t done, uint64_t steps_per_epoch)
{
    uint64_t every = o->save_strategy == FB_SAVE_STEPS ? o->save_steps : o->save_strategy == FB_SAVE_EPOCH ? steps_per_epoch : 0;
    return every && total > done ? total / every - done / every : 0;
}

fb_disk_need fb_preflight_disk_need(const fb_manifest *m, const fb_options *o, fb_dtype save_dtype, uint64_t companions,
                                    uint64_t total_steps, uint64_t done_steps, uint64_t steps_per_epoch, uint64_t n_present)
{
    uint64_t model = m->n_weight * fb_dtype_size(save_dtype) + m->n_param * HEADER_BYTES;
    uint64_t optimizer = 3 * m->n_weight * sizeof(float) + 3 * m->n_param * HEADER_BYTES;
    uint64_t due = saves_due(o, total_steps, done_steps, steps_per_epoch), at_once = n_present + due;
    /* The oldest is removed when the newest is whole. */
    if (o->save_total_limit && at_once > (uint64_t)o->save_total_limit + 1)
        at_once = (uint64_t)o->save_total_limit + 1;
    uint64_t more = at_once > n_present ? at_once - n_present : 0;
    return (fb_disk_need){ .optimizer = optimizer, .model = model + companions + SMALL_BYTES,
                           .checkpoint = optimizer + model + companions + SMALL_BYTES, .saves = due > 0,
                           .n_checkpoint = due && !more ? 1 : more };
}

fb_status fb_preflight_disk(const fb_disk_need *n, const char *output_dir, uint64_t available, uint64_t file_max, char *warning,
                            size_t warning_size, fb_error *err)
{
    uint64_t least = n->model + (n->saves ? n->checkpoint : 0), wanted = n->model + n->n_checkpoint * n->checkpoint;
    uint64_t longest = n->saves && n->optimizer > n->model ? n->optimizer : n->model;
    *warning = 0;
    if (least > available)
        return fb_fail_file(err, FB_IO, output_dir, "%s%.1f MiB, its file system has %.1f MiB free; free space, or set "
                            "output_dir to another%s", n->saves ? "one checkpoint and the final model take "
                            : "the final model takes ", mib(least), mib(available), n->saves ? ", or save_strategy: no" : "");
    if (longest > file_max)
        return fb_fail_file(err, FB_IO, output_dir, "the run writes a file of %.1f MiB, the limit on files is %.1f MiB; raise "
                            "ulimit -f", mib(longest), mib(file_max));
    if (wanted > available)
        snprintf(warning, warning_size, "%.200s: %llu checkpoints of %.1f MiB and the final model take %.1f MiB, its file system "
                 "has %.1f MiB free; set save_total_limit to keep fewer", output_dir, (unsigned long long)n->n_checkpoint,
                 mib(n->checkpoint), mib(wanted), mib(available));
    else if (!n->saves && n->model + n->checkpoint > available)
        snprintf(warning, warning_size, "%.200s: has no room for the checkpoint of %.1f MiB that a signal would save, %.1f MiB are "
                 "free", output_dir, mib(n->checkpoint), mib(available));
    return FB_OK;
}

fb_status fb_preflight_disk_room(const char *dir, uint64_t *available, uint64_t *file_max, fb_error *err)
{
    struct statvfs s;
    struct rlimit r;
    if (statvfs(dir, &s) != 0)
        return fb_fail_file(err, FB_IO, dir, "its file system does not say how much room it has: %s", strerror(errno));
    *available = (uint64_t)s.f_bavail * s.f_frsize;
    *file_max = getrlimit(RLIMIT_FSIZE, &r) == 0 && r.rlim_cur != RLIM_INFINITY ? r.rlim_cur : UINT64_MAX;
    return FB_OK;
}
