"""Settings of every part of Spillway: typed structs whose refusals name the setting, and sizes."""
