#include "train/decay.h"

#include <stdlib.h>

fb_status fb_decay_init(fb_decay *d, const fb_manifest *m, fb_error *err)
{
    uint32_t n = 0;
    d->ranges = calloc(m->n_param, sizeof *d->ranges);
    d->first = calloc(m->n_block + 1, sizeof *d->first);
    if (!d->ranges || !d->first)
        return fb_fail(err, FB_NOMEM, "update: no memory for %u parameters", m->n_param);
    for (uint32_t b = 0; b < m->n_block; b++) {
        const fb_block_desc *block = &m->blocks[b];
        d->first[b] = n;
        for (uint32_t i = 0; i < block->n_param; i++) {
            const fb_param *p = &m->params[block->param_first + i];
            uint64_t end = i + 1 < block->n_param ? p[1].offset : block->extent;
            if (n > d->first[b] && d->ranges[n - 1].decay == p->decay)
                d->ranges[n - 1].n = end - d->ranges[n - 1].first;
            else
                d->ranges[n++] = (fb_decay_range){ p->offset, end - p->offset, p->decay };
        }
    }
    d->first[m->n_block] = n;
    return FB_OK;
}

void fb_decay_deinit(fb_decay *d)
{
    free(d->ranges);
    free(d->first);
    *d = (fb_decay){ 0 };
}
