/* data.c - `forebay data`: prepare the token shards, or look at what would be learned. */
#include "model/manifest.h"
#include "run/dataset.h"
#include "run/job.h"

fb_status fb_data(fb_job *j, uint32_t n_preview, fb_error *err)
{
    static const char *const needed[] = { "model_name_or_path", "dataset", "output_dir" };
    fb_status st = FB_OK;
    const fb_options *o = &j->options;
    fb_manifest manifest = { 0 };
    fb_dataset data = { 0 };
    FB_TRY(fb_options_require(o, needed, n_preview ? 2 : FB_COUNT(needed), err));
    FB_TRY(fb_manifest_read(&manifest, o->model_name_or_path, err));
    if (n_preview)
        FB_TRY(fb_dataset_preview(o, &manifest.cfg, n_preview, &j->sink, err));
    else
        FB_TRY(fb_dataset_open(&data, o, &manifest.cfg, &j->stop, &j->sink, err));
done:
    fb_dataset_close(&data);
    fb_manifest_free(&manifest);
    return st;
}
