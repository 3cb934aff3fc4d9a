/* The other place where programs look for it. */
#include "umap/StoreNetwork.h"
