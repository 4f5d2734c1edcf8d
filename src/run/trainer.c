/* trainer.c - the loop: steps, log lines, evaluations, checkpoints, the final model. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/activity.h"
#include "base/clock.h"
#include "config/parse.h"
#include "io/lock.h"
#include "io/sys.h"
#include "optim/lr.h"
#include "run/checkpoint.h"
#include "run/dataset.h"
#include "run/evaluate.h"
#include "run/export.h"
#include "run/identity.h"
#include "run/job.h"
#include "run/preflight.h"
#include "run/saver.h"
#include "run/session.h"
#include "run/sink.h"
#include "run/trainlog.h"
#include "run/watchdog.h"

typedef struct trainer {
    fb_job           *job;
    const fb_options *o;
    const fb_sink    *sink;
    fb_dataset        data;
    fb_session        session;
    fb_loader        *rows, *eval_rows;
    fb_trainlog       log;
    fb_lock           lock;
    fb_activity       activity;
    fb_watchdog      *watchdog;
    fb_lr             lr;
    fb_progress       at;               /* loss_sum, n_learned: since the log's last line */
    json_t           *identity;         /* what a resume must agree on */
    fb_saver         *saver;
    fb_dtype          save_dtype;
    uint32_t          micro_rows, n_micro; /* rows in a micro-batch; micro-batches in a full step */
    double            started;
    double            elapsed_before;   /* by earlier starts of this run */
    bool              already_finished;
} trainer;

enum { TRACE_STEPS = 8 }; /* the newest, enough to see a pattern */

static double elapsed(const trainer *t)
{
    return t->elapsed_before + fb_clock() - t->started;
}

/* ---- set-up ---- */

static uint64_t steps_in_all(const fb_options *o, uint64_t per_epoch)
{
    return o->max_steps > 0 ? (uint64_t)o->max_steps : (uint64_t)ceil(o->num_train_epochs * (double)per_epoch);
}

static fb_lr schedule(const fb_options *o, uint64_t total)
{
    fb_lr s = {
        .type = (fb_lr_type)o->lr_scheduler_type, .base = o->learning_rate, .n_total = total, .n_cycle = o->num_cycles,
        .n_warmup = o->warmup_steps ? o->warmup_steps : (uint64_t)ceil(o->warmup_ratio * (double)total),
        .min_lr = o->min_lr >= 0 ? o->min_lr : o->min_lr_rate >= 0 ? o->min_lr_rate * o->learning_rate : 0,
        .min_ratio = o->min_lr_ratio, .warmup_shape = o->warmup_type, .decay_shape = o->decay_type,
        .n_decay = o->num_decay_steps, .n_stable = o->num_stable_steps,
    };
    if (!s.n_decay) /* transformers has no default; a tenth is the custom (Hu et al. 2024, section 4.2) */
        s.n_decay = total / 10;
    if (!s.n_stable && total > s.n_warmup + s.n_decay) /* transformers: what warmup and decay leave */
        s.n_stable = total - s.n_warmup - s.n_decay;
    return s;
}

static fb_status open_rows(trainer *t, const fb_session_request *r, uint32_t rows_per_step, fb_error *err)
{
    const fb_options *o = t->o;
    bool packing = fb_dataset_packing(o);
    fb_loader_options lo = { .row_len = r->row_len, .packing = packing, .shuffle = !o->disable_shuffling, .seed = o->seed,
                             .rows_per_step = rows_per_step, .rows_per_micro = r->micro_rows };
    fb_status st = fb_loader_new(&t->rows, &t->data.train, &lo, err);
    lo.packing = lo.shuffle = false;
    if (st == FB_OK && t->data.has_eval)
        st = fb_loader_new(&t->eval_rows, &t->data.eval, &lo, err);
    return st;
}

/* The plan, the cut into micro-batches that it chose, and rows served by that cut. */
static fb_status plan_rows(trainer *t, fb_session_request *r, uint32_t rows_per_step, fb_error *err)
{
    fb_status st = fb_session_plan(&t->session, r, err);
    if (st != FB_OK)
        return st;
    t->micro_rows = r->micro_rows;
    t->n_micro = r->n_micro;
    fb_loader_free(t->rows);
    fb_loader_free(t->eval_rows);
    t->rows = t->eval_rows = NULL;
    return open_rows(t, r, rows_per_step, err);
}

/* Success is claimed only of a folder that holds the whole model. */
static bool holds_model(const trainer *t)
{
    fb_session there = { 0 };
    bool whole = fb_session_open(&there, t->o->output_dir, NULL) == FB_OK;
    fb_session_close(&there);
    return whole;
}

static bool holds(const fb_options *o, const char *name)
{
    char path[FB_PATH_SIZE];
    return fb_path_join(path, sizeof path, o->output_dir, name, NULL) == FB_OK && fb_file_exists(path);
}

/* Whether the folder is the end of a run, or somebody's model. */
static bool holds_result(const fb_options *o)
{
    return holds(o, "trainer_state.json") || holds(o, "model.safetensors") || holds(o, "model.safetensors.index.json");
}

static fb_status refuse_result(const fb_options *o, fb_error *err)
{
    return fb_fail(err, FB_CONFIG, "%s: holds a finished model; name another output_dir, or set overwrite_output_dir: true to "
                   "replace it", o->output_dir);
}

static bool is_same_folder(const char *a, const char *b)
{
    struct stat at, bt;
    return stat(a, &at) == 0 && stat(b, &bt) == 0 && at.st_dev == bt.st_dev && at.st_ino == bt.st_ino;
}

/* What the folder alone says about whether a run may begin in it: before hours go into the data. */
static fb_status look_at_folder(const fb_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    bool resume = false, is_path = o->resume_from_checkpoint && !fb_parse_bool(o->resume_from_checkpoint, &resume);
    if (o->overwrite_output_dir || resume)
        return FB_OK;
    if (holds_result(o))
        FB_TRY(refuse_result(o, err));
    if (fb_checkpoint_any(o->output_dir) && !is_path)
        FB_TRY(fb_fail(err, FB_CONFIG, "%s: holds checkpoints of an earlier run; set resume_from_checkpoint: true to go on from "
                       "them, or overwrite_output_dir: true to remove them", o->output_dir));
done:
    return st;
}

/* Where the plan is free to cut steps into micro-batches, a resume cuts them as the run did: another cut would be other bits. */
static void adopt_cut(trainer *t, const json_t *then)
{
    uint32_t micro_rows = fb_identity_micro_rows(then);
    if (t->o->micro_batch == FB_AUTO && micro_rows) {
        t->micro_rows = micro_rows;
        fb_identity_set_micro_rows(t->identity, micro_rows);
    }
}

/* Where to go on from; dir is empty when the run starts afresh. */
static fb_status find_resume(trainer *t, char dir[FB_PATH_SIZE], fb_error *err)
{
    fb_status st = FB_OK;
    const char *asked = t->o->resume_from_checkpoint;
    char final_state[FB_PATH_SIZE];
    fb_progress found;
    json_t *identity = NULL;
    bool newest = false, is_path = asked && !fb_parse_bool(asked, &newest);
    dir[0] = 0;
    if (!newest && !is_path)
        return FB_OK;
    FB_TRY(fb_path_join(final_state, sizeof final_state, t->o->output_dir, "trainer_state.json", err));
    if (newest && fb_file_exists(final_state) && fb_checkpoint_read_progress(&found, &identity, t->o->output_dir, NULL) == FB_OK) {
        adopt_cut(t, identity);
        if (found.finished && fb_identity_check(identity, t->identity, final_state, NULL) == FB_OK && holds_model(t)) {
            t->already_finished = true;
            goto done;
        }
        if (found.finished && !t->o->overwrite_output_dir)
            FB_TRY(fb_identity_check(identity, t->identity, final_state, err));
        json_decref(identity);
        identity = NULL;
    }
    if (is_path) {
        FB_TRY(fb_path_join(dir, FB_PATH_SIZE, asked, "", err));
        dir[strlen(dir) - 1] = 0; /* the slash */
        FB_TRY(fb_checkpoint_verify(dir, t->sink, err));
    } else
        FB_TRY(fb_checkpoint_find(dir, t->o->output_dir, t->sink, err));
    if (!dir[0]) {
        if (holds_result(t->o) && !fb_file_exists(final_state) && !t->o->overwrite_output_dir)
            FB_TRY(refuse_result(t->o, err));
        goto done;
    }
    FB_TRY(fb_checkpoint_read_progress(&found, &identity, dir, err));
    adopt_cut(t, identity);
    FB_TRY(fb_identity_check(identity, t->identity, dir, err));
    const char *dtype = fb_identity_other_dtype(identity, t->identity);
    if (dtype)
        fb_say(t->sink, FB_SAY_WARNING, "%s: was computed in %s, the run goes on in %s, with other bits than it would have had",
               dir, dtype, fb_dtype_hf_str(t->session.act));
    found.finished = false;
    t->at = found;
done:
    json_decref(identity);
    return st;
}

/* What an earlier run left would be taken for this one's at the next resume. */
static fb_status clear_earlier_run(const fb_options *o, bool afresh, fb_error *err)
{
    char path[FB_PATH_SIZE];
    fb_status st = fb_path_join(path, sizeof path, o->output_dir, "trainer_state.json", err);
    if (st == FB_OK && fb_sys_unlink(path) != 0 && errno != ENOENT)
        st = fb_fail_file(err, FB_IO, path, "cannot be removed: %s", strerror(errno));
    return st != FB_OK || !afresh ? st : fb_checkpoint_remove_all(o->output_dir, err);
}

/* ---- what must hold before anything large is begun ---- */

static fb_status lock_folder(trainer *t, fb_error *err)
{
    fb_status st = FB_OK;
    if (is_same_folder(t->o->output_dir, t->o->model_name_or_path))
        FB_TRY(fb_fail(err, FB_CONFIG, "%s: output_dir is the folder of the model that is to be trained; name another",
                       t->o->output_dir));
    FB_TRY(fb_lock_take(&t->lock, t->o->output_dir, "train", err));
    if (t->lock.refused)
        fb_say(t->sink, FB_SAY_WARNING, "%s: its file system has no locks (%s): nothing keeps a second run from writing here too",
               t->o->output_dir, strerror(t->lock.refused));
    FB_TRY(fb_preflight_folder(t->o->output_dir, err));
done:
    return st;
}

static fb_status check_disk(trainer *t, fb_error *err)
{
    fb_status st = FB_OK;
    char warning[512];
    uint64_t available, file_max;
    uint64_t n_kept = t->at.data_step ? fb_checkpoint_count(t->o->output_dir) : 0; /* a fresh start keeps none */
    fb_disk_need need = fb_preflight_disk_need(&t->session.manifest, t->o, t->save_dtype,
        fb_export_companions_size(t->o->model_name_or_path), t->at.total_steps, t->at.data_step, t->at.steps_per_epoch, n_kept);
    FB_TRY(fb_preflight_disk_room(t->o->output_dir, &available, &file_max, err));
    if (!t->at.data_step)
        available += fb_checkpoint_bytes(t->o->output_dir);
    FB_TRY(fb_preflight_disk(&need, t->o->output_dir, available, file_max, warning, sizeof warning, err));
    if (warning[0])
        fb_say(t->sink, FB_SAY_WARNING, "%s", warning);
done:
    return st;
}

/* Before the first step there is nothing to save, and nothing is lost. */
static fb_status stopped_early(const trainer *t, fb_error *err)
{
    if (!t->job->stop)
        return FB_OK;
    return fb_fail(err, FB_STOPPED, "stopped before the first step; there is nothing to save, start again with the same command");
}

static void describe_engine(const void *engine, char *text, size_t size)
{
    fb_engine_describe(engine, text, size);
}

static fb_status set_up(trainer *t, fb_error *err)
{
    static const char *const needed[] = { "model_name_or_path", "dataset", "output_dir" };
    fb_status st = FB_OK;
    const fb_options *o = t->o;
    char resume[FB_PATH_SIZE];
    fb_session_request r = { .options = o, .train = true, .activity = &t->activity, .stop = &t->job->stop,
                             .saves = o->save_strategy != FB_SAVE_NO,
                             .trace_steps = o->trace ? TRACE_STEPS : 0 };
    const fb_model_config *c = &t->session.manifest.cfg;
    fb_memory_room room;
    uint32_t rows_per_step;
    t->started = fb_clock();
    FB_TRY(fb_options_require(o, needed, FB_COUNT(needed), err));
    /* The model is looked at before the data are prepared: its faults are found at once. */
    FB_TRY(fb_session_open(&t->session, o->model_name_or_path, err));
    FB_TRY(fb_export_check(o->model_name_or_path, err));
    t->save_dtype = o->save_dtype == FB_DTYPE_AUTO ? c->dtype : (fb_dtype)o->save_dtype;
    FB_TRY(lock_folder(t, err));
    FB_TRY(look_at_folder(o, err));
    fb_activity_enter(&t->activity, FB_PHASE_DATA, 0);
    if (fb_memory_room_now(&room))
        FB_TRY(fb_preflight_data(o->model_name_or_path, &room, err));
    FB_TRY(fb_dataset_open(&t->data, o, c, &t->job->stop, t->sink, err));
    FB_TRY(stopped_early(t, err));
    fb_activity_enter(&t->activity, FB_PHASE_CHECK, 0);
    fb_session_batch(o, &rows_per_step, &r.micro_rows, &r.n_micro);
    r.rows_per_step = rows_per_step;
    r.row_len = fb_dataset_row_len(&t->data, o);
    FB_TRY(plan_rows(t, &r, rows_per_step, err));
    t->at.rows_per_epoch = fb_loader_rows(t->rows);
    t->at.steps_per_epoch = fb_loader_steps_per_epoch(t->rows);
    t->at.total_steps = steps_in_all(o, t->at.steps_per_epoch);
    t->identity = fb_identity_new(o, c, &t->data.train, t->session.act, t->micro_rows, t->at.total_steps);
    if (!t->identity)
        FB_TRY(fb_fail(err, FB_NOMEM, "no memory for what the run is"));
    t->lr = schedule(o, t->at.total_steps);
    FB_TRY(find_resume(t, resume, err));
    if (t->already_finished)
        goto done;
    if (t->micro_rows != r.micro_rows) { /* another cut would be other bits */
        r.rows_per_step = 0, r.micro_rows = t->micro_rows, r.n_micro = (rows_per_step + r.micro_rows - 1) / r.micro_rows;
        FB_TRY(plan_rows(t, &r, rows_per_step, err));
    }
    FB_TRY(fb_preflight_memory(&t->session, o, err));
    FB_TRY(check_disk(t, err));
    FB_TRY(stopped_early(t, err));
    FB_TRY(fb_checkpoint_sweep(o->output_dir, t->sink, err));
    r.resumes = resume[0] != 0;
    FB_TRY(fb_session_start(&t->session, &r, err));
    fb_watchdog_add(t->watchdog, describe_engine, t->session.engine);
    FB_TRY(clear_earlier_run(o, !resume[0], err));
    if (resume[0]) {
        FB_TRY(fb_checkpoint_load(&t->session.state, resume, t->session.team, err));
        *fb_engine_rope(t->session.engine) = t->at.rope;
        t->elapsed_before = t->at.elapsed;
        fb_say(t->sink, FB_SAY_PROGRESS, "resumed from %s at step %llu", resume, (unsigned long long)t->at.data_step);
    }
    FB_TRY(fb_trainlog_open(&t->log, o->output_dir, t->at.data_step, err));
    FB_TRY(fb_saver_new(&t->saver, &(fb_saver_options){ .state = &t->session.state, .output_dir = o->output_dir,
        .model_dir = o->model_name_or_path, .save_dtype = t->save_dtype, .n_kept = o->save_total_limit,
        .last_block_first = o->max_grad_norm == 0, .buffer_size = t->session.plan.host[FB_HOST_SAVE_BUFFER].size,
        .team = t->session.team, .trace = t->session.trace }, err));
    fb_engine_hooks hooks = fb_saver_hooks(t->saver);
    fb_engine_set_hooks(t->session.engine, &hooks);
done:
    return st;
}

static void introduce(const trainer *t)
{
    const fb_session *s = &t->session;
    const fb_manifest *m = &s->manifest;
    fb_say(t->sink, FB_SAY_PROGRESS, "model: %s, %.1f M parameters, %u layers; %s on %s, updates by %s", m->cfg.arch->hf_name,
           (double)m->n_weight / 1e6, m->cfg.n_layer, fb_dtype_hf_str(s->act), s->info.name, fb_adamw_selected());
    char layout[FB_LAYOUT_SIZE];
    fb_layout_describe(&s->plan, m, layout);
    fb_say(t->sink, FB_SAY_PROGRESS, "memory: device %.1f MiB (weights are %.1f MiB), host %.1f MiB",
           (double)s->plan.device_bytes / 0x1p20, (double)m->extent * (double)fb_dtype_size(s->act) / 0x1p20,
           (double)s->plan.host_bytes / 0x1p20);
    fb_say(t->sink, FB_SAY_PROGRESS, "steps: %llu, of %llu rows an epoch; %u micro-batches a step; %s",
           (unsigned long long)t->at.total_steps, (unsigned long long)t->at.rows_per_epoch, t->n_micro, layout);
    fb_say(t->sink, FB_SAY_PROGRESS, "a step of %.3g s is foreseen; %s", s->foreseen.seconds, s->machine_note);
}

/* ---- lines ---- */

static double epoch_of(const trainer *t)
{
    return (double)t->at.data_step / (double)t->at.steps_per_epoch;
}

static json_t *common_fields(const trainer *t)
{
    return json_pack("{s:I, s:I, s:f, s:f}", "current_steps", (json_int_t)t->at.data_step, "total_steps",
                     (json_int_t)t->at.total_steps, "epoch", epoch_of(t), "percentage",
                     100.0 * (double)t->at.data_step / (double)t->at.total_steps);
}

static fb_status log_step(trainer *t, const fb_step_result *r, double lr, double step_seconds, fb_error *err)
{
    double seconds = elapsed(t), done = (double)t->at.data_step;
    json_t *line = common_fields(t);
    double mean = t->at.n_learned ? t->at.loss_sum / (double)t->at.n_learned : NAN;
    json_object_set_new(line, "loss", fb_json_real(mean));
    json_object_set_new(line, "grad_norm", fb_json_real(r->grad_norm));
    json_object_set_new(line, "learning_rate", fb_json_real(lr));
    json_object_set_new(line, "tokens", json_integer((json_int_t)r->n_learned));
    json_object_set_new(line, "tokens_all", json_integer((json_int_t)r->n_token));
    json_object_set_new(line, "step_time", fb_json_real(step_seconds));
    json_object_set_new(line, "tokens_per_second", fb_json_real((double)r->n_token / step_seconds));
    json_object_set_new(line, "elapsed_time", fb_json_real(seconds));
    json_object_set_new(line, "remaining_time", fb_json_real(seconds / done * ((double)t->at.total_steps - done)));
    json_object_set_new(line, "skipped", json_boolean(!r->updated));
    fb_say(t->sink, FB_SAY_PROGRESS, "step %llu/%llu  loss %.4f  grad_norm %.3f  lr %.3g  %.0f tokens/s",
           (unsigned long long)t->at.data_step, (unsigned long long)t->at.total_steps, mean, r->grad_norm, lr,
           (double)r->n_token / step_seconds);
    t->at.loss_sum = 0;
    t->at.n_learned = 0;
    return fb_trainlog_write(&t->log, line, err);
}

static fb_status evaluate(trainer *t, fb_error *err)
{
    double loss;
    uint64_t n;
    fb_activity_enter(&t->activity, FB_PHASE_EVAL, 0);
    fb_status st = fb_evaluate(t->session.engine, t->eval_rows, &loss, &n, err);
    if (st != FB_OK)
        return st;
    json_t *line = common_fields(t);
    json_object_set_new(line, "eval_loss", fb_json_real(loss));
    json_object_set_new(line, "eval_tokens", json_integer((json_int_t)n));
    json_object_set_new(line, "elapsed_time", fb_json_real(elapsed(t)));
    fb_say(t->sink, FB_SAY_PROGRESS, "step %llu/%llu  eval_loss %.4f (%llu tokens)", (unsigned long long)t->at.data_step,
           (unsigned long long)t->at.total_steps, loss, (unsigned long long)n);
    return fb_trainlog_write(&t->log, line, err);
}

/* ---- steps ---- */

static fb_status look_at_result(trainer *t, const fb_step_result *r, fb_error *err)
{
    if (r->updated) {
        t->at.update_step++;
        t->at.nonfinite_in_a_row = 0;
        t->at.loss_sum += r->loss_sum;
        t->at.n_learned += r->n_learned;
        return FB_OK;
    }
    char rows[128];
    if (!r->n_learned) {
        fb_say(t->sink, FB_SAY_WARNING, "step %llu: its rows have nothing to learn; the step is passed over",
               (unsigned long long)t->at.data_step);
        return FB_OK;
    }
    fb_loader_describe(t->rows, t->at.data_step - 1, rows, sizeof rows);
    t->at.nonfinite_in_a_row++;
    fb_say(t->sink, FB_SAY_WARNING, "step %llu: loss %g, gradient norm %g; the step is passed over (%u in a row), its rows are %s",
           (unsigned long long)t->at.data_step, r->loss_sum / (double)r->n_learned, r->grad_norm, t->at.nonfinite_in_a_row, rows);
    if (t->o->nonfinite_limit && t->at.nonfinite_in_a_row >= t->o->nonfinite_limit)
        return fb_fail(err, FB_NONFINITE, "loss or gradient norm was not finite in %u steps in a row (nonfinite_limit), the last "
                       "of rows %s; lower learning_rate or look at these rows", t->at.nonfinite_in_a_row, rows);
    return FB_OK;
}

static bool due(int strategy, uint32_t every, const trainer *t)
{
    uint64_t step = t->at.data_step;
    if (strategy == FB_SAVE_STEPS)
        return every && step % every == 0;
    return strategy == FB_SAVE_EPOCH && step % t->at.steps_per_epoch == 0;
}

/* Says how the last save went.  One that failed ends the run: it would go on for hours without a checkpoint to come back to.
 * But not a run that has no more steps to lose: its model is saved. */
static fb_status look_at_save(trainer *t, fb_error *err)
{
    fb_saver_report r;
    fb_error why;
    fb_status st;
    if (!fb_saver_ended(t->saver, &r, &st, &why))
        return FB_OK;
    unsigned long long step = r.step;
    if (st != FB_OK && t->at.data_step < t->at.total_steps)
        return fb_fail(err, st == FB_DEVICE ? st : FB_IO, "%s; checkpoint-%llu was not saved and the run ends, %sgo on from the "
                       "checkpoint before with resume_from_checkpoint: true", why.msg, step,
                       st == FB_DEVICE ? "" : "make room and ");
    if (st != FB_OK)
        fb_say(t->sink, FB_SAY_WARNING, "%s; checkpoint-%llu was not saved", why.msg, step);
    else
        fb_say(t->sink, FB_SAY_PROGRESS, "checkpoint-%llu: %.1f MiB in %.2f s, training waited %.2f s for it", step,
               (double)r.bytes / 0x1p20, r.seconds, r.waited);
    return FB_OK;
}

static fb_status finish_save(trainer *t, fb_error *err)
{
    fb_saver_wait(t->saver);
    return look_at_save(t, err);
}

static fb_status save(trainer *t, fb_error *err)
{
    fb_status st = FB_OK;
    if (fb_saver_is_busy(t->saver))
        fb_say(t->sink, FB_SAY_PROGRESS, "step %llu: waits until the checkpoint before is whole",
               (unsigned long long)t->at.data_step);
    FB_TRY(finish_save(t, err));
    fb_activity_enter(&t->activity, FB_PHASE_SAVE, 0);
    fb_engine_settle(t->session.engine);
    t->at.elapsed = elapsed(t);
    t->at.rope = *fb_engine_rope(t->session.engine);
    char *state = fb_checkpoint_progress_text(&t->at, t->identity);
    if (!state)
        FB_TRY(fb_fail(err, FB_NOMEM, "checkpoint: no memory for trainer_state.json"));
    FB_TRY(fb_trainlog_sync(&t->log, err));
    fb_saver_begin(t->saver, t->at.data_step, state);
done:
    return st;
}

static fb_status one_step(trainer *t, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_options *o = t->o;
    fb_step_result r;
    fb_activity_step(&t->activity, t->at.data_step + 1);
    fb_activity_enter(&t->activity, FB_PHASE_BATCH, 0);
    double before = elapsed(t), lr = fb_lr_at(&t->lr, t->at.update_step);
    uint32_t n = fb_loader_fill(t->rows, t->session.engine, t->at.data_step, NULL);
    fb_adamw a = { .lr = lr, .beta1 = o->adam_beta1, .beta2 = o->adam_beta2, .eps = o->adam_epsilon,
                   .weight_decay = o->weight_decay, .step = t->at.update_step + 1 };
    FB_TRY(fb_engine_step(t->session.engine, n, &a, o->max_grad_norm, &r, err));
    t->at.data_step++;
    FB_TRY(look_at_result(t, &r, err));
    bool last = t->at.data_step == t->at.total_steps;
    if (o->logging_steps && (t->at.data_step % o->logging_steps == 0 || last))
        FB_TRY(log_step(t, &r, lr, elapsed(t) - before, err));
    if (t->eval_rows && (due(o->eval_strategy, o->eval_steps, t) || (last && o->eval_strategy != FB_SAVE_NO)))
        FB_TRY(evaluate(t, err));
    FB_TRY(look_at_save(t, err));
    if (due(o->save_strategy, o->save_steps, t))
        FB_TRY(save(t, err));
done:
    return st;
}

static fb_status steps(trainer *t, fb_error *err)
{
    fb_status early = stopped_early(t, err);
    if (early != FB_OK)
        return early;
    while (t->at.data_step < t->at.total_steps) {
        fb_status st = one_step(t, err);
        if (st != FB_OK)
            return st;
        if (t->job->stop && t->at.data_step < t->at.total_steps) {
            st = due(t->o->save_strategy, t->o->save_steps, t) ? FB_OK : save(t, err);
            st = st == FB_OK ? finish_save(t, err) : st;
            return st != FB_OK ? st : fb_fail(err, FB_STOPPED, "stopped after step %llu of %llu, checkpoint saved in %s; go on "
                "with resume_from_checkpoint: true", (unsigned long long)t->at.data_step, (unsigned long long)t->at.total_steps,
                t->o->output_dir);
        }
    }
    return FB_OK;
}

static fb_status finish(trainer *t, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_session *s = &t->session;
    FB_TRY(finish_save(t, err));
    fb_activity_enter(&t->activity, FB_PHASE_FINISH, 0);
    fb_engine_settle(s->engine);
    t->at.finished = true;
    t->at.elapsed = elapsed(t);
    t->at.rope = *fb_engine_rope(s->engine);
    fb_session_memory held = fb_session_measure(s);
    fb_device_info info;
    s->device->ops->info(s->device, &info);
    fb_say(t->sink, FB_SAY_PROGRESS, "attention: %s", info.attention);
    fb_say(t->sink, FB_SAY_PROGRESS, "memory: device planned %.1f, measured %.1f MiB; host planned %.1f, measured %.1f MiB",
           (double)s->plan.device_bytes / 0x1p20, (double)held.device / 0x1p20, (double)s->plan.host_bytes / 0x1p20,
           (double)held.host / 0x1p20);
    if (t->o->trace)
        FB_TRY(fb_trace_write(s->trace, t->o->trace, err));
    FB_TRY(fb_session_write_memory(s, t->o->output_dir, err));
    FB_TRY(fb_checkpoint_write_progress(&t->at, t->identity, t->o->output_dir, err));
    FB_TRY(fb_export_model(&s->state, t->o->model_name_or_path, t->o->output_dir, t->save_dtype, err));
    fb_say(t->sink, FB_SAY_RESULT, "the model is in %s", t->o->output_dir);
done:
    return st;
}

fb_status fb_train(fb_job *j, fb_error *err)
{
    fb_status st = FB_OK;
    trainer t = { .job = j, .o = &j->options, .sink = &j->sink };
    FB_TRY(fb_watchdog_start(&t.watchdog, j, &t.activity, t.o->watchdog, err));
    st = set_up(&t, err);
    if (st != FB_OK && t.job->stop) /* whatever a stopped child complained of */
        st = stopped_early(&t, err);
    FB_TRY(st);
    if (t.already_finished) {
        fb_say(t.sink, FB_SAY_RESULT, "nothing to do: the run is finished, the model is in %s", t.o->output_dir);
        goto done;
    }
    introduce(&t);
    FB_TRY(steps(&t, err));
    FB_TRY(finish(&t, err));
done:
    fb_watchdog_stop(t.watchdog);
    fb_trainlog_close(&t.log);
    fb_saver_wait(t.saver); /* which may wait for what only this thread sends from the device */
    fb_engine_free(t.session.engine); /* its workers may wait for the saver, which reads the state */
    t.session.engine = NULL;
    fb_saver_free(t.saver);
    json_decref(t.identity);
    fb_session_close(&t.session);
    fb_loader_free(t.rows);
    fb_loader_free(t.eval_rows);
    fb_dataset_close(&t.data);
    fb_lock_give(&t.lock);
    return st;
}
