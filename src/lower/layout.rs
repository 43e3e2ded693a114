//! Where a kernel finds captured tensors and scalars: their order, and how they are packed.

use crate::error::{Error, Result};
use crate::expr::{Capture, CaptureData, CaptureDecl, Expr, Scalar, ScalarDecl};

/// The order of captured tensors and scalars in a kernel's parameters. By name, so that it does not depend on
/// who asks.
///
/// `info` (vec4 of u32, after the parameters) holds for capture c its dimensions at `2 c` and its word offset and
/// element offset at `2 c + 1`; then the scalars, four to a vec4, as bits. All captures lie one after the other
/// in the buffer `captures`, but one may be bound in place as `large`. A kernel that has no binding `large`, as
/// those of gradients, is [`Layout::crowded`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// The captured tensors, by name.
    pub captures: Vec<CaptureDecl>,
    /// The scalars, by name.
    pub scalars: Vec<ScalarDecl>,
    /// The capture that is bound in place.
    pub large: Option<String>,
    /// The capture in place takes the binding `captures`, and the others follow what is in `tables`.
    pub crowded: bool,
}

/// The binding that a captured tensor lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    Captures,
    Large,
    Tables,
}

impl Layout {
    /// The layout for what these expressions read.
    pub fn new<'a>(exprs: impl IntoIterator<Item = &'a Expr>, large: Option<&str>) -> Layout {
        let mut layout = Layout { large: large.map(str::to_owned), ..Layout::default() };
        for expr in exprs {
            layout.captures.extend(expr.captures());
            layout.scalars.extend(expr.scalars());
        }
        layout.captures.sort();
        layout.captures.dedup();
        layout.scalars.sort();
        layout.scalars.dedup();
        layout
    }

    /// The number of vec4 in `info`; the kernel's array has at least one.
    pub fn info_len(&self) -> usize {
        (2 * self.captures.len() + self.scalars.len().div_ceil(4)).max(1)
    }

    /// The words of the buffer `captures`: every capture but the one in place, each from a new word on.
    ///
    /// # Errors
    /// When a capture is missing or its values are on a device.
    pub fn words(&self, captures: &[Capture]) -> Result<Vec<u32>> {
        let mut words = Vec::new();
        for decl in &self.captures {
            if self.is_large(decl) {
                continue;
            }
            let capture = find(captures, decl)?;
            match capture.data() {
                CaptureData::F32(x) => words.extend(x.iter().map(|x| x.to_bits())),
                CaptureData::I32(x) => words.extend(x.iter().map(|x| *x as u32)),
                CaptureData::U32(x) => words.extend_from_slice(x),
                CaptureData::F16(x) => words.extend(x.chunks(2).map(|x| pair(x, |x| x.to_bits()))),
                CaptureData::BF16(x) => words.extend(x.chunks(2).map(|x| pair(x, |x| x.to_bits()))),
                CaptureData::Bool(x) => {
                    words.extend(x.chunks(4).map(|x| {
                        x.iter().enumerate().fold(0, |word, (i, x)| word | (u32::from(*x) << (8 * i)))
                    }))
                }
                CaptureData::Device(_) => {
                    return Err(Error::capture(
                        capture.name(),
                        "its values are on a device; it can only be bound in place (one such tensor per call)",
                    ));
                }
            }
        }
        Ok(words)
    }

    /// The contents of `info`. `large_at` is the element at which the capture in place begins in its buffer.
    ///
    /// # Errors
    /// When a capture or scalar is missing or of another type.
    pub fn info(&self, captures: &[Capture], scalars: &[Scalar], large_at: u32) -> Result<Vec<[u32; 4]>> {
        self.info_with_gradients(captures, scalars, large_at, &[])
    }

    /// Where the gradient of each of the captured tensors `names` begins, in elements, when they lie one after the
    /// other in this order; and, last, the number of all elements.
    ///
    /// # Errors
    /// When one is missing, or all together do not fit u32.
    pub fn gradient_offsets(&self, captures: &[Capture], names: &[String]) -> Result<Vec<u32>> {
        let mut offsets = vec![0u32];
        for name in names {
            let capture = captures.iter().find(|c| c.name() == name).ok_or_else(|| {
                Error::capture(name, "its gradient is wanted but no such captured tensor was given")
            })?;
            let last = offsets[offsets.len() - 1];
            let end = u32::try_from(capture.len()).ok().and_then(|len| last.checked_add(len));
            offsets.push(end.ok_or_else(|| {
                Error::overflow(
                    "the gradients of captured tensors have more than 2^32 elements; ask for fewer per call",
                )
            })?);
        }
        Ok(offsets)
    }

    /// The contents of `info` for a kernel with `terms`: as [`Layout::info`], and where the gradient of each of
    /// `names` begins in the third word of its offsets.
    ///
    /// # Errors
    /// As [`Layout::info`] and [`Layout::gradient_offsets`].
    pub fn info_with_gradients(
        &self,
        captures: &[Capture],
        scalars: &[Scalar],
        large_at: u32,
        names: &[String],
    ) -> Result<Vec<[u32; 4]>> {
        let gradients = self.gradient_offsets(captures, names)?;
        let gradient_at = |decl: &CaptureDecl| {
            names.iter().position(|name| **name == *decl.name).map_or(0, |i| gradients[i])
        };
        let mut info = Vec::with_capacity(self.info_len());
        let mut words = 0u32;
        for decl in &self.captures {
            let capture = find(captures, decl)?;
            let mut dims = [1; 4];
            for (slot, dim) in dims.iter_mut().zip(capture.shape()) {
                *slot = *dim as u32;
            }
            info.push(dims);
            if self.is_large(decl) {
                info.push([0, large_at, gradient_at(decl), 0]);
            } else {
                info.push([words, 0, gradient_at(decl), 0]);
                let size = (capture.len() * decl.dtype.bytes()).div_ceil(4);
                let end = u32::try_from(size).ok().and_then(|size| words.checked_add(size));
                words = end.ok_or_else(|| {
                    Error::overflow("the captured tensors together are more than 16 GiB; captures are indexed by u32 words")
                })?;
            }
        }
        let mut bits = Vec::with_capacity(self.scalars.len());
        for decl in &self.scalars {
            let scalar = scalars.iter().find(|s| s.decl() == *decl).ok_or_else(|| {
                Error::capture(&*decl.name, format!("this {} scalar is read but was not given", decl.ty))
            })?;
            bits.push(scalar.value().bits());
        }
        info.extend(bits.chunks(4).map(|chunk| {
            let mut four = [0; 4];
            four[..chunk.len()].copy_from_slice(chunk);
            four
        }));
        info.resize(self.info_len(), [0; 4]);
        Ok(info)
    }

    /// The number of a capture.
    pub(super) fn capture(&self, decl: &CaptureDecl) -> Result<usize> {
        match self.captures.iter().position(|d| d == decl) {
            Some(i) => Ok(i),
            None => Err(Error::capture(&*decl.name, "it is read but missing in the kernel's layout")),
        }
    }

    /// The number of the word of `info` that holds a scalar.
    pub(super) fn scalar(&self, decl: &ScalarDecl) -> Result<usize> {
        match self.scalars.iter().position(|d| d == decl) {
            Some(i) => Ok(8 * self.captures.len() + i),
            None => Err(Error::capture(&*decl.name, "it is read but missing in the kernel's layout")),
        }
    }

    /// Whether everything that `expr` reads is in the layout.
    pub(super) fn covers(&self, expr: &Expr) -> Result<()> {
        expr.captures().iter().try_for_each(|decl| self.capture(decl).map(drop))?;
        expr.scalars().iter().try_for_each(|decl| self.scalar(decl).map(drop))
    }

    /// The binding that a capture lies in.
    pub(crate) fn home(&self, decl: &CaptureDecl) -> Home {
        match (self.is_large(decl), self.crowded) {
            (true, false) => Home::Large,
            (false, true) => Home::Tables,
            (false, false) | (true, true) => Home::Captures,
        }
    }

    fn is_large(&self, decl: &CaptureDecl) -> bool {
        self.large.as_deref() == Some(&*decl.name)
    }
}

fn find<'a>(captures: &'a [Capture], decl: &CaptureDecl) -> Result<&'a Capture> {
    captures.iter().find(|c| c.decl() == *decl).ok_or_else(|| {
        Error::capture(
            &*decl.name,
            format!("a {} tensor of rank {} is read but was not given", decl.dtype, decl.rank),
        )
    })
}

fn pair<T: Copy>(x: &[T], bits: impl Fn(T) -> u16) -> u32 {
    let high = x.get(1).map_or(0, |x| u32::from(bits(*x)));
    u32::from(bits(x[0])) | (high << 16)
}
