# find_package(farpage) gives farpage::farpage, farpage::static and farpage::umap (the interface of
# Umap, C++17).
get_filename_component(_farpage_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET farpage::farpage)
  add_library(farpage::farpage SHARED IMPORTED)
  set_target_properties(farpage::farpage PROPERTIES
    IMPORTED_LOCATION "${_farpage_prefix}/lib/libfarpage.so"
    IMPORTED_SONAME libfarpage.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${_farpage_prefix}/include")

  add_library(farpage::static STATIC IMPORTED)
  set_target_properties(farpage::static PROPERTIES
    IMPORTED_LOCATION "${_farpage_prefix}/lib/libfarpage.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_farpage_prefix}/include"
    INTERFACE_LINK_LIBRARIES "pthread;dl;m;rt;util")

  add_library(farpage::umap SHARED IMPORTED)
  set_target_properties(farpage::umap PROPERTIES
    IMPORTED_LOCATION "${_farpage_prefix}/lib/libumap.so"
    IMPORTED_SONAME libumap.so.0
    IMPORTED_LINK_DEPENDENT_LIBRARIES farpage::farpage
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_INCLUDE_DIRECTORIES "${_farpage_prefix}/include")
endif()

unset(_farpage_prefix)
