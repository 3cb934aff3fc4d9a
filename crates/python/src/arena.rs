//! [`Arena`]: numpy's own allocations in remote memory, by the handlers of NEP 49.
//!
//! The rule it keeps: an array is freed by the handler that allocated it, however late: after the
//! block, after the runtime. A handler holds all that it needs for that, and goes by the address:
//! numpy's size of an allocation may be wrong. numpy itself keeps the current handler, one per
//! context. An arena with arrays is not closed, and a closed one makes none.

use std::{
    ffi::{CStr, c_char, c_void},
    mem,
    ops::Range,
    ptr::{self, NonNull},
    sync::{Arc, Weak},
};

use parking_lot::{MappedRwLockReadGuard, Mutex, Once};
use pyo3::{exceptions::PyImportError, ffi, prelude::*, types::PyCapsule};

use crate::{
    error::CloseError,
    process::{End, Held},
};

/// Name of a capsule that holds a handler.
const NAME: &CStr = c"mem_handler";
/// Places of `PyDataMem_SetHandler` and `PyDataMem_GetHandler` in numpy's table of functions, which
/// only grows. Both are there from numpy 1.22 on.
const SET_HANDLER: usize = 304;
const GET_HANDLER: usize = 305;
/// Alignment of arrays, as by numpy's own allocator.
const ALIGN: usize = 64;

/// `PyDataMemAllocator` of numpy.
#[repr(C)]
struct Allocator {
    context: *mut c_void,
    malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void, usize),
}

/// `PyDataMem_Handler` of numpy.
#[repr(C)]
struct Handler {
    name: [c_char; 127],
    version: u8,
    allocator: Allocator,
}

/// Contents of a capsule. numpy reads the handler at the beginning.
#[repr(C)]
struct Contents {
    handler: Handler,
    /// Target of `handler.allocator.context`.
    context: Box<Context>,
}

// SAFETY: the pointer in `handler` is to `context`, which `Contents` owns.
unsafe impl Send for Contents {}

/// State of a handler.
struct Context {
    min_bytes: usize,
    /// The handler that was current before, which serves requests of less than `min_bytes`.
    before: NonNull<Handler>,
    arena: Option<Arc<Held<farpage::Arena>>>,
    /// The arena's addresses, also after its end.
    addresses: Range<usize>,
    /// Done when a line has said that the arena is closed.
    told: Once,
    /// Object that has to live longer than the arena.
    keep: Option<Py<PyAny>>,
    /// Capsule that holds `before`.
    before_object: Option<Py<PyAny>>,
}

// SAFETY: numpy's handlers may be called from any thread that holds the interpreter's lock, and
// `before` is held by `before_object`.
unsafe impl Send for Context {}

/// The arena that an allocation is in.
enum Place<'a> {
    Arena(MappedRwLockReadGuard<'a, farpage::Arena>, NonNull<u8>),
    /// The arena of the process that made this one by `fork`.
    Parents,
    Elsewhere,
}

impl Context {
    /// Returns the arena if a request of `bytes` is for it. Requests in a child made by `fork`,
    /// which does not have the arena, and after the arena's end are not.
    fn arena_for(&self, bytes: usize) -> Option<MappedRwLockReadGuard<'_, farpage::Arena>> {
        let arena = self.arena.as_deref()?;
        if bytes < self.min_bytes || !arena.is_own() {
            return None;
        }
        let here = arena.here();
        if here.is_none() {
            self.told.call_once(|| {
                eprintln!(
                    "farpage: a runtime was closed within a block of its `allocate`: arrays that \
                     are made there from now on lie in local memory"
                );
            });
        }
        here
    }

    fn before(&self) -> &Allocator {
        // SAFETY: `before_object` holds the capsule, whose contents do not change.
        &unsafe { self.before.as_ref() }.allocator
    }

    /// Finds the allocation that begins at `address`.
    fn place_of(&self, address: *mut c_void) -> Place<'_> {
        let (Some(arena), Some(own)) = (self.arena.as_deref(), NonNull::new(address.cast())) else {
            return Place::Elsewhere;
        };
        if !self.addresses.contains(&(address as usize)) {
            return Place::Elsewhere;
        }
        if !arena.is_own() {
            return Place::Parents;
        }
        // Addresses of a closed arena may have been mapped again.
        arena
            .here()
            .map_or(Place::Elsewhere, |arena| Place::Arena(arena, own))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The last handle to go unmaps the region, which waits.
        drop(self.arena.take());
        // Objects dropped outside would be kept until the next thread attaches.
        let objects = (self.keep.take(), self.before_object.take());
        Python::try_attach(|_| drop(objects));
    }
}

/// The arenas of this process.
static ARENAS: Mutex<Vec<Weak<Held<farpage::Arena>>>> = Mutex::new(Vec::new());

/// An arena of the crate `farpage`.
#[pyclass(frozen, module = "farpage._farpage")]
pub(crate) struct Arena {
    held: Arc<Held<farpage::Arena>>,
    /// Object that has to live longer than the arena.
    keep: Option<Py<PyAny>>,
}

impl End for farpage::Arena {
    fn end(self) -> Result<(), String> {
        Ok(())
    }
}

impl Arena {
    pub(crate) fn new(arena: farpage::Arena) -> Arena {
        let held = Arc::new(Held::new("the arena of this runtime", arena));
        let mut arenas = ARENAS.lock();
        arenas.retain(|it| it.strong_count() > 0);
        arenas.push(Arc::downgrade(&held));
        Arena { held, keep: None }
    }

    /// Makes `keep` live longer than the arena.
    pub(crate) fn keeping(self, keep: Option<Py<PyAny>>) -> Arena {
        Arena { keep, ..self }
    }

    pub(crate) fn held(&self) -> &Arc<Held<farpage::Arena>> {
        &self.held
    }
}

/// Returns an error if an arena has arrays.
pub(crate) fn unallocated(bytes: usize) -> Result<(), CloseError> {
    match bytes {
        0 => Ok(()),
        bytes => Err(CloseError::InUse(format!(
            "arrays of {bytes} bytes that were made under `allocate` are left: delete them, and \
             all views of them, before the runtime is closed"
        ))),
    }
}

/// Closes an arena unless it has arrays.
pub(crate) fn close(arena: &Held<farpage::Arena>) -> Result<(), CloseError> {
    let mut place = arena.place();
    unallocated(place.as_ref().map_or(0, farpage::Arena::allocated_bytes))?;
    let ended = place.take();
    // Handlers wait for the place, with the interpreter's lock, and the end takes a while.
    drop(place);
    drop(ended);
    Ok(())
}

/// True if `address` lies in an array that was made under `allocate`.
#[pyfunction]
pub(crate) fn is_allocated(py: Python<'_>, address: usize) -> bool {
    py.detach(|| {
        let arenas: Vec<_> = ARENAS.lock().iter().filter_map(Weak::upgrade).collect();
        let is_in = |arena: &Arc<Held<farpage::Arena>>| {
            (arena.here()).is_some_and(|arena| arena.is_allocated(address..address + 1))
        };
        arenas.iter().any(|arena| arena.is_own() && is_in(arena))
    })
}

#[pymethods]
impl Arena {
    /// Makes a handler for numpy: requests of `min_bytes` and more come from the arena, others go
    /// to the handler that is current now.
    fn handler<'py>(&self, py: Python<'py>, min_bytes: usize) -> PyResult<Bound<'py, PyCapsule>> {
        let addresses = self.held.with(py, farpage::Arena::addresses)?;
        let before = current_handler(py)?;
        // SAFETY: takes the capsule's pointer, or says that it is no such capsule.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(before.as_ptr(), NAME.as_ptr()) };
        let pointer = NonNull::new(pointer.cast()).ok_or_else(|| PyErr::fetch(py))?;
        let mut context = Box::new(Context {
            min_bytes: min_bytes.max(1),
            before: pointer,
            arena: Some(self.held.clone()),
            addresses,
            told: Once::new(),
            keep: self.keep.as_ref().map(|keep| keep.clone_ref(py)),
            before_object: Some(before.unbind()),
        });
        let mut name = [0; 127];
        for (to, from) in name.iter_mut().zip(b"farpage") {
            *to = *from as c_char;
        }
        let handler = Handler {
            name,
            version: 1,
            allocator: Allocator {
                context: ptr::from_mut(&mut *context).cast(),
                malloc,
                calloc,
                realloc,
                free,
            },
        };
        let contents = Contents { handler, context };
        PyCapsule::new_with_value_and_destructor(py, contents, NAME, |contents, _| drop(contents))
    }

    /// Returns the bytes of the arena that numpy has now, in whole pages.
    fn allocated_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.held.with(py, farpage::Arena::allocated_bytes)
    }
}

/// Makes `handler` the current one of this context. Returns the one before.
#[pyfunction]
pub(crate) fn set_handler<'py>(handler: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = handler.py();
    let set = table(py, SET_HANDLER)?;
    // SAFETY: that is the function's type, at its place in the table.
    let set: unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject =
        unsafe { mem::transmute(set) };
    // SAFETY: numpy takes a reference of its own and returns one, or sets an error.
    unsafe { Bound::from_owned_ptr_or_err(py, set(handler.as_ptr())) }
}

fn current_handler(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let get = table(py, GET_HANDLER)?;
    // SAFETY: that is the function's type, at its place in the table.
    let get: unsafe extern "C" fn() -> *mut ffi::PyObject = unsafe { mem::transmute(get) };
    // SAFETY: returns a reference, or sets an error.
    unsafe { Bound::from_owned_ptr_or_err(py, get()) }
}

/// Returns entry `at` of numpy's table of functions.
fn table(py: Python<'_>, at: usize) -> PyResult<*const c_void> {
    let module = (py.import("numpy._core._multiarray_umath"))
        .or_else(|_| py.import("numpy.core._multiarray_umath"))?;
    let capsule = module.getattr("_ARRAY_API")?;
    // SAFETY: numpy's capsule has no name and holds its table.
    let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) };
    let table = table.cast::<*const c_void>();
    if table.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: numpy 1.22 and newer have this entry, and the package asks for 1.25.
    let entry = unsafe { *table.add(at) };
    if entry.is_null() {
        return Err(PyImportError::new_err(
            "this numpy has no handlers of memory",
        ));
    }
    Ok(entry)
}

/// # Safety
/// `context` is that of a handler that lives.
unsafe fn of<'a>(context: *mut c_void) -> &'a Context {
    // SAFETY: the caller's promise; it is shared from its making on.
    unsafe { &*context.cast::<Context>() }
}

/// Returns the address, or null if the arena has no room: numpy raises `MemoryError` then.
fn or_null(allocated: Result<NonNull<u8>, farpage::ArenaError>) -> *mut c_void {
    allocated.map_or(ptr::null_mut(), |it| it.as_ptr().cast())
}

unsafe extern "C" fn malloc(context: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: numpy passes the handler's context.
    let context = unsafe { of(context) };
    let before = context.before();
    match context.arena_for(bytes) {
        Some(arena) => or_null(arena.allocate_uninit(bytes, ALIGN)),
        // SAFETY: as numpy would call it.
        None => unsafe { (before.malloc)(before.context, bytes) },
    }
}

unsafe extern "C" fn calloc(context: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
    // SAFETY: numpy passes the handler's context.
    let context = unsafe { of(context) };
    let before = context.before();
    let all = count.checked_mul(bytes);
    match all.and_then(|all| Some((context.arena_for(all)?, all))) {
        // Zeros already, without touching them.
        Some((arena, all)) => or_null(arena.allocate(all, ALIGN)),
        // SAFETY: as numpy would call it.
        None => unsafe { (before.calloc)(before.context, count, bytes) },
    }
}

unsafe extern "C" fn realloc(
    context: *mut c_void,
    address: *mut c_void,
    bytes: usize,
) -> *mut c_void {
    if address.is_null() {
        // SAFETY: as numpy would call it.
        return unsafe { malloc(context, bytes) };
    }
    // SAFETY: numpy passes the handler's context.
    let context = unsafe { of(context) };
    match context.place_of(address) {
        // SAFETY: numpy uses the old address no more if there is a new one.
        Place::Arena(arena, own) => or_null(unsafe { arena.reallocate(own, bytes, ALIGN) }),
        Place::Parents => ptr::null_mut(),
        Place::Elsewhere => {
            let before = context.before();
            // The allocation's length is not known here, so it cannot be copied into the arena.
            // SAFETY: as numpy would call it.
            unsafe { (before.realloc)(before.context, address, bytes) }
        }
    }
}

unsafe extern "C" fn free(context: *mut c_void, address: *mut c_void, bytes: usize) {
    // SAFETY: numpy passes the handler's context.
    let context = unsafe { of(context) };
    match context.place_of(address) {
        Place::Arena(arena, own) => {
            // A page that cannot be given back yet is tried again when others are.
            // SAFETY: numpy does not use it any more.
            let _ = unsafe { arena.deallocate(own) };
        }
        Place::Parents => {}
        Place::Elsewhere => {
            let before = context.before();
            // SAFETY: the handler before has allocated it; as numpy would call it.
            unsafe { (before.free)(before.context, address, bytes) };
        }
    }
}
