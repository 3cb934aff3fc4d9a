//! SEAM SPECIFICATION (to be implemented): what one worker thread uses to move pages.

pub struct Lane<F> { _f: std::marker::PhantomData<F> }
