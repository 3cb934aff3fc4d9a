/* A plugin whose constructor waits for a thread that asks for large memory. The loader holds its
 * lock meanwhile. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static void *ask(void *result) {
    (void)result;
    char *made = malloc(1 << 20);
    if (made) memset(made, 1, 1 << 20);
    return made;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    void *made = NULL;
    if (pthread_create(&thread, NULL, ask, NULL) || pthread_join(thread, &made) || !made) abort();
    free(made);
}
