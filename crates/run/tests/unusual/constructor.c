/* A plugin whose constructor, and a thread that it waits for, fill more memory than the budget. The
 * loader holds its lock meanwhile. */
#include <pthread.h>
#include <stdlib.h>

enum { WORDS = 2 << 20 };

static void *fill(void *result) {
    (void)result;
    unsigned *made = malloc(WORDS * sizeof *made);
    if (!made) return NULL;
    for (unsigned at = 0; at < WORDS; at++) made[at] = at * 2654435761u;
    for (unsigned at = 0; at < WORDS; at++) if (made[at] != at * 2654435761u) return NULL;
    return made;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    void *mine = fill(NULL), *made = NULL;
    if (pthread_create(&thread, NULL, fill, NULL) || pthread_join(thread, &made)) abort();
    if (!mine || !made) abort();
    free(mine);
    free(made);
}
