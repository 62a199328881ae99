"""Every clip, caption and label judged before any GPU time is spent on them."""
