/* bus_error.h - the sentence for a mapped file that is no longer there.
 *
 * Token shards are mapped.  When another process makes one shorter, or its disk fails, the next read of a lost page is no error
 * that a call could return but SIGBUS.  With this handler the command ends with exit code 1 and one sentence
 * that names the file; what had been saved is whole, since a file of ours is only ever renamed into place. */
#ifndef FB_CLI_BUS_ERROR_H
#define FB_CLI_BUS_ERROR_H

void fb_bus_error_catch(void);

#endif
