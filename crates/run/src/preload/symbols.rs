//! Functions of the libraries behind this one, by the tables of their files ([`find`]).
//!
//! The rule it keeps: no function of the loader that this library replaces is needed. All others
//! are found by `next.rs`.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr, slice,
};

use crate::code;

/// Tags of a file's dynamic section, absent from the published bindings.
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
/// Section of symbols that a file only uses.
const SHN_UNDEF: u16 = 0;

/// Entry of a dynamic section.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// Search through the libraries in their order.
struct SymbolSearch<'a> {
    name: &'a CStr,
    has_passed_own: bool,
    found: *mut c_void,
}

/// Returns the first function of a name in a library behind this one; null if there is none.
pub(crate) fn find(name: &CStr) -> *mut c_void {
    let mut search = SymbolSearch {
        name,
        has_passed_own: false,
        found: ptr::null_mut(),
    };
    // SAFETY: `look` takes a `SymbolSearch`.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// Continues a [`SymbolSearch`] in the next library. Returns 1 when the function is found.
unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: what `find` and `dl_iterate_phdr` pass.
    unsafe {
        let search = &mut *search.cast::<SymbolSearch<'_>>();
        if code::holds(info, look as *const () as usize) {
            search.has_passed_own = true;
        } else if search.has_passed_own {
            search.found = Tables::of(info).map_or(ptr::null_mut(), |it| it.find(search.name));
        }
        c_int::from(!search.found.is_null())
    }
}

/// Tables of a library's symbols.
struct Tables {
    base: usize,
    names: *const c_char,
    symbols: *const libc::Elf64_Sym,
    /// Table by the names' hashes (`DT_GNU_HASH`).
    hashes: *const u32,
}

impl Tables {
    /// Returns the tables of a library. `None`: it has none by hashes, as the kernel's own.
    ///
    /// # Safety
    /// `info` is what `dl_iterate_phdr` passes.
    unsafe fn of(info: *const libc::dl_phdr_info) -> Option<Tables> {
        // SAFETY: the caller's promise, with the loader's table of headers. A dynamic section ends
        // with a tag of 0.
        unsafe {
            let base = (*info).dlpi_addr as usize;
            let headers = slice::from_raw_parts((*info).dlpi_phdr, (*info).dlpi_phnum.into());
            let dynamic = headers.iter().find(|it| it.p_type == libc::PT_DYNAMIC)?;
            let first = ptr::with_exposed_provenance::<Dynamic>(base + dynamic.p_vaddr as usize);
            let all = (0..).map(|at| &*first.add(at)).take_while(|it| it.tag != 0);
            let (mut names, mut symbols, mut hashes) = (None, None, None);
            for Dynamic { tag, value } in all {
                // The loader has made most of them addresses.
                let at = if *value < base { base + value } else { *value };
                match *tag {
                    DT_STRTAB => names = Some(at),
                    DT_SYMTAB => symbols = Some(at),
                    DT_GNU_HASH => hashes = Some(at),
                    _ => {}
                }
            }
            Some(Tables {
                base,
                names: ptr::with_exposed_provenance(names?),
                symbols: ptr::with_exposed_provenance(symbols?),
                hashes: ptr::with_exposed_provenance(hashes?),
            })
        }
    }

    /// Returns a function that the library defines; null if it does not.
    ///
    /// # Safety
    /// The tables are a library's.
    unsafe fn find(&self, name: &CStr) -> *mut c_void {
        let hash = hash(name);
        // SAFETY: the table begins with four numbers, words of a filter, and the buckets, each with
        // the first symbol of its chain. The last hash of a chain is odd.
        unsafe {
            let [buckets, first, words] = [0, 1, 2].map(|at| *self.hashes.add(at));
            let bucket = self.hashes.add(4 + 2 * words as usize);
            let chain = bucket.add(buckets as usize);
            let mut at = *bucket.add((hash % buckets.max(1)) as usize);
            while at >= first.max(1) {
                let (symbol, known) = (
                    &*self.symbols.add(at as usize),
                    *chain.add((at - first) as usize),
                );
                let its = CStr::from_ptr(self.names.add(symbol.st_name as usize));
                if known | 1 == hash | 1 && symbol.st_shndx != SHN_UNDEF && its == name {
                    let address = self.base + symbol.st_value as usize;
                    return ptr::with_exposed_provenance_mut(address);
                }
                if known & 1 == 1 {
                    break;
                }
                at += 1;
            }
        }
        ptr::null_mut()
    }
}

/// Returns the hash of a name, as linkers compute it.
fn hash(name: &CStr) -> u32 {
    let bytes = name.to_bytes().iter();
    bytes.fold(5381, |hash: u32, &byte| {
        hash.wrapping_mul(33).wrapping_add(byte.into())
    })
}
