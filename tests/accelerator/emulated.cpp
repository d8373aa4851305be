// All of the emulated accelerator in one unit: reading torch's headers is nearly all of the work, and is done once.
#include "device.cpp"
#include "operators.cpp"
#include "attention.cpp"
#include "collectives.cpp"
