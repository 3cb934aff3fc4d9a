//! Named regions: listing and removal.

use std::ffi::{CString, c_char, c_void};

use crate::{
    error::{Failure, farpage_code, guard},
    options,
    runtime::farpage_runtime,
};

/// Calls `each` for every region that this user has published under a name on the runtime's
/// servers, ordered by name: with `context`, the name, the bytes that the region takes on servers,
/// and whether a program has it open for writing. The name is valid until `each` returns. `each`
/// must not throw exceptions.
///
/// # Safety
/// `runtime` came from `farpage_runtime_new` and has not been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_names(
    runtime: *const farpage_runtime,
    each: Option<
        unsafe extern "C" fn(context: *mut c_void, name: *const c_char, bytes: u64, in_use: u32),
    >,
    context: *mut c_void,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let runtime = unsafe { farpage_runtime::get(runtime) }?;
        let each = each.ok_or_else(|| Failure::invalid("no function to call: it is null"))?;
        for named in runtime.names()? {
            // A name with a zero byte, which only a Rust program can have made, ends there.
            let text = named.name.split('\0').next().unwrap_or_default();
            let name = CString::new(text).expect("ends before its first zero byte");
            // SAFETY: the caller's function, called as it is declared.
            unsafe { each(context, name.as_ptr(), named.bytes, u32::from(named.in_use)) };
        }
        Ok(())
    })
}

/// Removes the region that this user has published under `name`, and frees its memory. Programs
/// that have it open to read keep it until they unmap it. Fails with FARPAGE_NOT_FOUND if `name`
/// does not exist, with FARPAGE_IN_USE if a program has it open for writing.
///
/// # Safety
/// `runtime` came from `farpage_runtime_new` and has not been freed; `name` is a string that ends
/// with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_name_remove(
    runtime: *const farpage_runtime,
    name: *const c_char,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let (runtime, name) = unsafe {
            (
                farpage_runtime::get(runtime)?,
                options::text(name, "the name")?,
            )
        };
        let name = name.ok_or_else(|| Failure::invalid("no name: it is null"))?;
        Ok(runtime.remove(name)?)
    })
}
