#include "run/evaluate.h"

#include "run/dataset.h"
#include "run/job.h"
#include "run/session.h"
#include "run/sink.h"

fb_status fb_evaluate(fb_engine *e, fb_loader *rows, double *loss, uint64_t *n_learned, fb_error *err)
{
    double sum = 0;
    *n_learned = 0;
    for (uint64_t step = 0; step < fb_loader_steps_per_epoch(rows); step++) {
        fb_step_result r;
        fb_status st = fb_engine_eval(e, fb_loader_fill(rows, e, step, NULL), &r, err);
        if (st != FB_OK)
            return st;
        sum += r.loss_sum;
        *n_learned += r.n_learned;
    }
    *loss = sum / (double)*n_learned; /* forebay.data lets no shard through in which nothing is learned */
    return FB_OK;
}

fb_status fb_eval(fb_job *j, double *loss, uint64_t *n_token, fb_error *err)
{
    static const char *const needed[] = { "model_name_or_path", "dataset", "output_dir" };
    fb_status st = FB_OK;
    const fb_options *o = &j->options;
    fb_dataset data = { 0 };
    fb_session session = { 0 };
    fb_loader *rows = NULL;
    FB_TRY(fb_options_require(o, needed, FB_COUNT(needed), err));
    FB_TRY(fb_session_open(&session, o->model_name_or_path, err));
    FB_TRY(fb_dataset_open(&data, o, &session.manifest.cfg, &j->stop, &j->sink, err));
    const fb_tokens *tokens = data.has_eval ? &data.eval : &data.train;
    uint32_t micro_rows = o->per_device_eval_batch_size;
    fb_session_request r = { .options = o, .row_len = tokens->doc_len_max,
                             .micro_rows = micro_rows, .n_micro = 1 };
    FB_TRY(fb_loader_new(&rows, tokens, &(fb_loader_options){ .row_len = r.row_len, .rows_per_step = micro_rows,
        .rows_per_micro = micro_rows }, err));
    FB_TRY(fb_session_plan(&session, &r, err));
    FB_TRY(fb_session_start(&session, &r, err));
    FB_TRY(fb_evaluate(session.engine, rows, loss, n_token, err));
    fb_say(&j->sink, FB_SAY_RESULT, "eval_loss: %.6f (%llu tokens)", *loss, (unsigned long long)*n_token);
done:
    fb_session_close(&session);
    fb_loader_free(rows);
    fb_dataset_close(&data);
    return st;
}
