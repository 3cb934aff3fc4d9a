/* Calls to a program's store, as farpage makes them. */
#pragma once

#include <cstddef>

#include "farpage.h"
#include "umap/store/Store.hpp"

namespace Umap::shim {

/* The store as farpage's: it asks for runs of pages; stores that were written for Umap know single
 * ones. What `context` holds is given back by `release`. */
farpage_store store_calls(Umap::Store *store, std::size_t page_bytes);

}  // namespace Umap::shim
