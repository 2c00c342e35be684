"""The statistics that predictions may be normalised by; their accuracy is told for each apart."""

# those of the stream, compared with source images of the same labels; the batch's own; the source's
VIEWS = ("matched", "plain", "source")
