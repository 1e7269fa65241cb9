// Placeholder.
#pragma once
#include "layout.cuh"
#include "params.cuh"
