//! Parquet: a string column, nested or not, row group by row group.
//!
//! Columns are read below the Arrow layer, as bytes: a value that is not UTF-8 is then one dropped row instead of a
//! damaged file, workers do the checking, and only the pages of the wanted columns are read.

use std::path::Path;
use std::sync::Arc;

use contract::{Fault, Result};
use parquet::basic::{ConvertedType, LogicalType, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescPtr;
use store::pieces::Pieces;

use super::columns::{Column, Rows, guarded_pieces, in_group, only_or_null, wrong_column};
use super::decompress::Tee;
use super::groups::{Cut, Groups, Layout};
use super::{Content, Fields, Input, Limits, Records, Slab, kinds};
use crate::disk::Disk;

/// Rows read at a time while a slab fills.
const ROWS_MAX: usize = 1024;

/// The format's name for a group of rows.
const KIND: &str = "row group";

/// Reads the row groups of a file in order.
pub(super) struct Reader {
    path: Arc<Path>,
    limits: Limits,
    pieces: Pieces,
    file: SerializedFileReader<Pieces>,
    tee: Tee,
    groups: Groups,
    text: Leaf,
    id: Option<Leaf>,
    /// The next row group to open.
    group: usize,
    open: Option<Group>,
}

/// A leaf column of the file's schema.
struct Leaf {
    index: usize,
    /// A value is present where its definition level is the highest.
    level: i16,
    unsigned: bool,
    /// Whether its type is that of a column without any values.
    null: bool,
}

/// A row group being read.
struct Group {
    number: u32,
    rows: u64,
    next: u64,
    chunk: usize,
    text: ColumnReader,
    id: Option<ColumnReader>,
}

/// The rows of a file.
pub(super) fn rows(disk: &dyn Disk, path: &Path) -> Result<u64> {
    let (_, file) = opened(disk, path)?;
    Ok(u64::try_from(file.metadata().file_metadata().num_rows()).unwrap_or_default())
}

/// A file and its reader of pieces.
fn opened(disk: &dyn Disk, path: &Path) -> Result<(Pieces, SerializedFileReader<Pieces>)> {
    let pieces = disk.pieces(path).map_err(|error| Fault::io("open", path, &error))?;
    let file = guarded_pieces(path, &pieces, || SerializedFileReader::new(pieces.clone()));
    let file = file.map_err(|fault| kinds::instead(disk, path, fault))?;
    Ok((pieces, file))
}

impl Reader {
    pub(super) fn open(
        disk: &dyn Disk,
        path: &Path,
        fields: &Fields,
        limits: Limits,
        cut: Option<&Cut>,
    ) -> Result<Self> {
        let (pieces, file) = opened(disk, path)?;
        let columns = file.metadata().file_metadata().schema_descr().columns();
        let text = leaf(path, columns, fields.path(), &[PhysicalType::BYTE_ARRAY])?;
        let kinds = [PhysicalType::BYTE_ARRAY, PhysicalType::INT32, PhysicalType::INT64];
        let id = fields.id.as_deref().map(|id| leaf(path, columns, id, &kinds)).transpose()?;
        let layout = Layout::of_metadata(path, &pieces, file.metadata())?;
        let groups = Groups::new(path, layout, file.num_row_groups(), cut)?;
        let (path, tee, group) = (path.into(), groups.tee(disk, path)?, groups.range.start);
        Ok(Reader { path, limits, pieces, file, tee, groups, text, id, group, open: None })
    }

    /// Opens the next row group that has rows.
    fn next_group(&mut self) -> Result<Option<Group>> {
        while self.group < self.groups.range.end {
            let index = self.group;
            self.group += 1;
            let meta = self.file.metadata().row_group(index);
            let rows = u64::try_from(meta.num_rows()).map_err(|_| self.torn(index, "row"))?;
            let number = u32::try_from(index).map_err(|_| self.torn(index, "group"))?;
            if rows == 0 {
                continue;
            }
            let bytes = meta.column(self.text.index).uncompressed_size().max(1) as u64;
            let chunk = (self.limits.slab_bytes as u64).saturating_mul(rows) / bytes / 4;
            let chunk = chunk.clamp(1, ROWS_MAX as u64) as usize;
            let (text, id) = guarded_pieces(&self.path, &self.pieces, || {
                let group = self.file.get_row_group(index)?;
                let id =
                    self.id.as_ref().map(|id| group.get_column_reader(id.index)).transpose()?;
                Ok::<_, ParquetError>((group.get_column_reader(self.text.index)?, id))
            })
            .map_err(in_group(&self.path, KIND, index))?;
            return Ok(Some(Group { number, rows, next: 0, chunk, text, id }));
        }
        Ok(None)
    }

    /// Reads rows of the open group until the slab is full.
    fn fill(&self, group: &mut Group) -> Result<Slab> {
        let (first, number) = (group.next, group.number);
        let (mut text, mut id, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut integers = Vec::new();
        while group.next < group.rows && (text.is_empty() || bytes < self.limits.slab_bytes) {
            let wanted = (group.rows - group.next).min(group.chunk as u64) as usize;
            let before = text.len();
            guarded_pieces(&self.path, &self.pieces, || {
                strings(&mut group.text, &self.text, wanted, &mut text)?;
                match (&mut group.id, &self.id) {
                    (Some(_), Some(leaf)) if leaf.null => {
                        integers.resize(text.len(), None);
                        Ok(())
                    }
                    (Some(reader @ ColumnReader::ByteArrayColumnReader(_)), Some(leaf)) => {
                        strings(reader, leaf, wanted, &mut id)
                    }
                    (Some(reader), Some(leaf)) => numbers(reader, leaf, wanted, &mut integers),
                    _ => Ok(()),
                }
            })
            .map_err(in_group(&self.path, KIND, number as usize))?;
            bytes += text[before..].iter().flatten().map(|value| value.len()).sum::<usize>();
            group.next += wanted as u64;
        }
        let rows = text.len();
        let id = match group.id {
            Some(ColumnReader::ByteArrayColumnReader(_)) if integers.is_empty() => {
                Some(Column::Bytes(id))
            }
            Some(_) => Some(Column::Integers(integers)),
            None => None,
        };
        let text = Column::Bytes(text);
        let (path, bytes_max) = (self.path.clone(), self.limits.max_document_bytes);
        let kind = KIND;
        Ok(Slab(Records::Rows(Rows {
            path,
            kind,
            group: number,
            first,
            rows,
            text,
            id,
            bytes_max,
        })))
    }

    fn torn(&self, group: usize, what: &str) -> Fault {
        Fault::data(format!("the Parquet file has an impossible {what} count"))
            .at(format!("{}: {KIND} {group}", self.path.display()))
            .hint("fetch or write the file again")
    }
}

impl Input for Reader {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        let mut group = match self.open.take() {
            Some(group) => group,
            None => match self.next_group()? {
                Some(group) => group,
                None => {
                    self.tee.read_to(u64::MAX, &self.path)?;
                    return Ok(None);
                }
            },
        };
        let slab = self.fill(&mut group)?;
        if group.next < group.rows {
            self.open = Some(group);
        } else {
            // The identity is computed along with the row groups, so that there is no long pause at the end.
            let meta = self.file.metadata().row_group(group.number as usize);
            let (start, length) = meta.column(self.text.index).byte_range();
            self.tee.read_to(start.saturating_add(length), &self.path)?;
        }
        Ok(Some(slab))
    }

    fn raw_bytes(&self) -> u64 {
        self.tee.bytes()
    }

    fn content(&self) -> Content {
        self.groups.content(&self.tee, self.groups.range.len() as u64)
    }
}

/// Finds the leaf column `name`, which must have one of these physical types.
fn leaf(
    path: &Path,
    columns: &[ColumnDescPtr],
    name: &str,
    kinds: &[PhysicalType],
) -> Result<Leaf> {
    let known: Vec<String> = columns.iter().map(|column| column.path().string()).collect();
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let is_null =
        |index: usize| matches!(columns[index].logical_type_ref(), Some(LogicalType::Unknown));
    let index = only_or_null(path, name, &known, is_null)?;
    let column = &columns[index];
    let (level, null) = (column.max_def_level(), is_null(index));
    if null && column.max_rep_level() == 0 {
        return Ok(Leaf { index, level, unsigned: false, null });
    }
    let wanted = if kinds.len() == 1 { "strings" } else { "strings or integers" };
    if column.max_rep_level() > 0 {
        return Err(wrong_column(path, name, "a list", wanted));
    }
    if !kinds.contains(&column.physical_type()) {
        return Err(wrong_column(path, name, column.physical_type(), wanted));
    }
    if !is_plain(column) {
        let kind = match column.logical_type_ref() {
            // Its name, without the parameters behind it.
            Some(kind) => {
                let shown = format!("{kind:?}").to_lowercase();
                let end = shown.find(|c: char| !c.is_alphanumeric()).unwrap_or(shown.len());
                format!("{} of type {}", column.physical_type(), &shown[..end])
            }
            None => column.converted_type().to_string(),
        };
        return Err(wrong_column(path, name, kind, wanted));
    }
    let unsigned = matches!(column.logical_type_ref(), Some(LogicalType::Integer(kind)) if !kind.is_signed)
        || column.converted_type().to_string().starts_with("UINT");
    Ok(Leaf { index, level, unsigned, null: false })
}

/// Whether the bytes or integers of a column are its values: those of a decimal or a date are not.
fn is_plain(column: &ColumnDescPtr) -> bool {
    use ConvertedType as Old;
    match column.logical_type_ref() {
        Some(LogicalType::String | LogicalType::Enum | LogicalType::Json) => true,
        Some(LogicalType::Integer(_)) => true,
        Some(_) => false,
        None => matches!(
            column.converted_type(),
            Old::NONE
                | Old::UTF8
                | Old::ENUM
                | Old::JSON
                | Old::INT_8
                | Old::INT_16
                | Old::INT_32
                | Old::INT_64
                | Old::UINT_8
                | Old::UINT_16
                | Old::UINT_32
                | Old::UINT_64
        ),
    }
}

fn strings(
    reader: &mut ColumnReader,
    leaf: &Leaf,
    rows: usize,
    values: &mut Vec<Option<parquet::data_type::ByteArray>>,
) -> std::result::Result<(), ParquetError> {
    if leaf.null {
        values.resize(values.len() + rows, None);
        return Ok(());
    }
    let ColumnReader::ByteArrayColumnReader(reader) = reader else {
        return Err(ParquetError::General("the column is not one of strings".to_owned()));
    };
    column(reader, leaf, rows, values, |value| value)
}

fn numbers(
    reader: &mut ColumnReader,
    leaf: &Leaf,
    rows: usize,
    values: &mut Vec<Option<i128>>,
) -> std::result::Result<(), ParquetError> {
    match (reader, leaf.unsigned) {
        (ColumnReader::Int32ColumnReader(reader), false) => {
            column(reader, leaf, rows, values, i128::from)
        }
        (ColumnReader::Int32ColumnReader(reader), true) => {
            column(reader, leaf, rows, values, |value| i128::from(value as u32))
        }
        (ColumnReader::Int64ColumnReader(reader), false) => {
            column(reader, leaf, rows, values, i128::from)
        }
        (ColumnReader::Int64ColumnReader(reader), true) => {
            column(reader, leaf, rows, values, |value| i128::from(value as u64))
        }
        _ => Err(ParquetError::General("the column is not one of integers".to_owned())),
    }
}

/// Appends exactly `rows` values, including absent ones.
fn column<T: DataType, V>(
    reader: &mut ColumnReaderImpl<T>,
    leaf: &Leaf,
    rows: usize,
    out: &mut Vec<Option<V>>,
    value_of: impl Fn(T::T) -> V,
) -> std::result::Result<(), ParquetError> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let (got, ..) = reader.read_records(rows, Some(&mut levels), None, &mut values)?;
    if got != rows {
        return Err(ParquetError::General("a column ends before its row group".to_owned()));
    }
    let mut values = values.into_iter().map(value_of);
    if leaf.level == 0 {
        out.extend(values.map(Some));
    } else {
        out.extend(levels.iter().map(
            |&level| {
                if level == leaf.level { values.next() } else { None }
            },
        ));
    }
    Ok(())
}
