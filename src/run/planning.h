/* planning.h - from a job's options to what the search for a layout wants: a machine, wishes, a request. */
#ifndef FB_RUN_PLANNING_H
#define FB_RUN_PLANNING_H

#include "config/options.h"
#include "device/device.h"
#include "plan/search.h"

enum { FB_MACHINE_NOTE_SIZE = 256 };

/* What the process holds beside the ledger's other lines: code, libraries' heaps, thread stacks. */
static const uint64_t FB_RUNTIME_BYTES = 8u << 20;
/* And for a device with memory of its own: driver and libraries once it is open (measured where the device is here), and what they
 * take later, for kernels, plans of products and attention, tables of pinned pages. */
static const uint64_t FB_DRIVER_BYTES = 384u << 20, FB_DRIVER_LATER_BYTES = 64u << 20;

/* The ledger's line of all that.  driver: what it takes once the device is open; of a device with memory of its own. */
uint64_t fb_planning_runtime(bool unified, uint32_t n_thread, uint64_t driver);

/* The machine that has this device: as `forebay probe` left it in the user's cache folder, else as the shipped profile of its
 * device has it, else guessed.  note: which, as a sentence. */
void fb_planning_machine(fb_machine *out, char note[FB_MACHINE_NOTE_SIZE], const fb_device_info *info);

/* unified: device memory is host memory; nothing is nearer there, and what stays on the host can be saved while it trains.
 * FB_CONFIG: placement names more layers than there are. */
fb_status fb_planning_wishes(fb_wishes *out, const fb_options *o, const fb_manifest *m, bool unified, uint32_t rows_per_step,
                             fb_error *err);

/* fb_plan_search, and where the run saves checkpoints, with their buffer: of the size asked for, or of what the host has left.
 * FB_NOFIT: as there; the buffer, if auto of its least size, is among what needs memory. */
fb_status fb_planning_search(fb_plan *out, fb_timeline *t, fb_plan_request *r, const fb_machine *machine, const fb_wishes *w,
                             const fb_options *o, bool saves, fb_error *err);

/* A training step on a machine that is not here, with so much device and host memory (0: all that it has). */
fb_plan_request fb_planning_absent(const fb_options *o, const fb_manifest *m, const fb_machine *machine, uint64_t hbm,
                                   uint64_t ram);

enum { FB_LAYOUT_SIZE = 256 };
/* A plan's layout in words, as one part of a sentence. */
void fb_layout_describe(const fb_plan *p, const fb_manifest *m, char text[FB_LAYOUT_SIZE]);

#endif
