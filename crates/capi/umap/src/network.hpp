/* What umap_ex needs to know of StoreNetwork: its pages are paged by farpage itself, not by calls
 * to the store. */
#pragma once

#include <cstddef>
#include <memory>

#include "regions.hpp"
#include "umap/store/Store.hpp"

namespace Umap::shim {

/* Whether the store is a StoreNetwork. (No dynamic_cast: a program may be compiled without type
 * information.) */
bool is_network_store(const Store *store);

/* The first `length` bytes of the store's array, at `address` unless that is null, and nowhere else
 * if it is `fixed`. Null with an errno when it is mapped already, too short, lies elsewhere, or
 * cannot be made. */
std::unique_ptr<Backing> open_array(Store *store, std::size_t length, void *address, bool fixed,
                                    int *number);

}  // namespace Umap::shim
