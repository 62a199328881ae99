"""Videos and images: where their bytes are, headers, frames and pixels."""
