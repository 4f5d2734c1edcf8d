/* fault.h - a device that wraps another and misbehaves as told, for tests of the scheduler and of recovery.
 *
 * spec: comma-separated words
 *   seed=N            seed of the random choices (default 1)
 *   delay=MICROS      before each copy and kernel, on its own stream, with probability 1/4, sleep 0..MICROS: streams
 *                     drift apart, so that an ordering that holds by luck alone breaks
 *   fail=OP:N         the Nth call (from 1) of OP fails with FB_DEVICE: alloc, pin, event_new, upload, download,
 *                     fill_zero, record, wait, call, sync, event_wait_host, or a kernel's name; any:N: the Nth call of all
 *   slow=OP:N         the Nth call of OP takes 300 ms longer, on its stream if it has one
 *   poison=BYTE       every allocation is filled with BYTE (decimal): runs with different bytes agree only if nothing is read
 *                     before it is written
 *   count=PATH        at close appends "device OP calls" for every OP to PATH
 * The wrapped back end is the default one. */
#ifndef FB_DEVICE_FAULT_FAULT_H
#define FB_DEVICE_FAULT_FAULT_H

#include "device/device.h"

fb_status fb_fault_open(fb_device **out, const fb_device_options *o, const char *spec, fb_error *err);

#endif
