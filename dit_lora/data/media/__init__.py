"""Videos and images: location of their bytes, headers, frames and pixels."""
