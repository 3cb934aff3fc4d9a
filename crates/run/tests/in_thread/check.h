/* CHECK: ends the program with a line if a condition does not hold. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Function that ends the program. Define another one where handlers of signals check. */
#ifndef CHECK_ENDS
#define CHECK_ENDS exit
#endif

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno);                   \
            CHECK_ENDS(1);                                                                         \
        }                                                                                          \
    } while (0)
