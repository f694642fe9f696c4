//! Rows of columnar files: a text column and perhaps an id column, ready for a worker.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryViewArray, LargeBinaryArray, LargeStringArray, StringArray,
};
use arrow::datatypes::{DataType, Int64Type, UInt64Type};
use contract::fault::nearest;
use contract::{Fault, Result};

use super::{Document, Fields, Parsed, lost};
